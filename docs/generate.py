"""Writes configuration.md, from the comments in conf/, commands.md, from what the commands say of themselves, and parts
of hooks.md, kinds.md and reference.md, from the hookspecs, the kinds of plugins and docstrings: `python
docs/generate.py`."""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import attrs
from board import board, records
from reference import of_members, reference

from plait.commands.main import command_of, parser_of, shipped
from plait.compose.keys import Key, keys, of_a_run
from plait.contract import hookspecs
from plait.contract.config import Config
from plait.contract.kinds import KINDS, PluginKind
from plait.contract.observer import Observer, RunObserver
from plait.data.batches import Batches
from plait.data.source import Source

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
COMMANDS = shipped()
CONFIGURATION = """\
# Configuration

<!-- written by docs/generate.py from the comments in conf/: change those -->

This page lists every configuration key with its default and meaning.

You can set every key on the command line: `plait train train.steps=100 model.dim=512`. `plait train --cfg job` prints
the resulting configuration without running it. A list in brackets needs quotes in most shells: `'strategy=[fsdp2]'`.
You must give a value for a key whose default is `???`. Your own options are files `./conf/<group>/<option>.yaml`, or
files under `--config-dir`. An option of yours
replaces an option of the same name that Plait or a package ships, and one in `--config-dir` replaces one in `./conf`.
An option that two packages ship, or a package and Plait, is refused if a run selects it; `plait plugins` lists all.

A value must have exactly the type of its key: `true` is not a number, `1` is not `true`, `1.5` and `1e3` are not
integers, and text that looks like a number needs its own quotes (`'run.name="1.10"'`). A value that does not fit, an
unknown key, and a deleted key (`~train.steps`) end the command with one sentence that names the key, before anything is
written.

## A run
"""

COMMANDS_PAGE = """\
# Commands

<!-- written by docs/generate.py from core/plait/commands/: change those -->

This page lists every command and what it takes: what `plait COMMAND --help` prints.

{table}

A mistake ends a command with one sentence on standard error and exit code 1, unless its section names another code.
A signal that stops a command gives exit code 128 + its number.

## plait train

It takes overrides of [the configuration](configuration.md), and the options of Hydra: `-m` runs
[a sweep](sweeps.md), `--cfg job` prints the configuration, `--config-dir DIR` adds a folder with configuration of your
own, `--help` and `--info` explain. Exit codes: 3 if a job of a sweep failed; of a run 4 if memory was full, 5 if a
kernel met an index outside of its tensor, 6 if the compiler failed.

{commands}
"""


def keys_of(path: Path) -> list[Key]:
    return list(keys(path.read_text(encoding="utf-8")))


def header(path: Path) -> str:
    """The comment that a file begins with, without Hydra's directive."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("# "))
    return " ".join(lines)


def table(titles: str, rows: Iterable[Iterable[str]]) -> str:
    names = titles.split(", ")
    cells = [[cell.replace("|", r"\|").replace("<", r"\<") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (names, *cells)]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def configuration() -> str:
    run = of_a_run()
    nodes = {key.path.partition(".")[0] for key in run if "." in key.path}
    rows = [
        (f"**{key.path}**" if key.path in nodes else code(key.path), code(key.value), key.comment)
        for key in run
        if key.path in nodes or key.comment
    ]
    parts = [CONFIGURATION, table("key, default, meaning", rows)]
    defaults = dict(re.findall(r"^  - (\w+): (\w+)$", (CONF / "train.yaml").read_text(encoding="utf-8"), re.MULTILINE))
    parts += [group(name, defaults[name]) for name in ("model", "data", "optimizer")]
    parts += [group("cluster", "h100", alike=True)]
    parts += ["\n## model, of packages\n\nFurther ones of this repository:"]
    models = {*ROOT.glob("plugins/*/src/*/conf/model/*.yaml")} - {*folder_of("model", defaults["model"]).glob("*.yaml")}
    for path in sorted(models):
        parts += packaged(path, f"`model={path.stem}`", "model")
    parts += ["\n## optimizer, of packages\n\nThose of this repository:"]
    for path in sorted(ROOT.glob("plugins/*/src/*/conf/optimizer/*.yaml")):
        parts += packaged(path, f"`optimizer={path.stem}`", "optimizer")
    parts += ["\n## strategy\n\nEach comes with an installed package. Those of this repository:"]
    for path in sorted(ROOT.glob("plugins/*/src/*/conf/strategy/*.yaml")):
        parts += packaged(path, f"`'strategy=[{path.stem}]'`", f"strategy.{path.stem}")
    parts += ["\n## loss, of packages\n\nWithout one a run learns by cross-entropy. Those of this repository:"]
    for path in sorted(ROOT.glob("plugins/*/src/*/conf/loss/*.yaml")):
        parts += packaged(path, f"`loss={path.stem}`", f"loss.function.{path.stem}")
    parts += ["\n## sink\n\nBeside metrics.jsonl, and beside what `metrics` switches on:\n"]
    sinks = [*(CONF / "sink").glob("*.yaml"), *ROOT.glob("plugins/*/src/*/conf/sink/*.yaml")]
    options_of = [(path, keys_of(path)) for path in sorted(sinks, key=lambda path: path.stem)]
    rows = [(code(f"'sink=[{path.stem}]'"), "", header(path)) for path, _ in options_of]
    rows += [
        (code(f"sink.{path.stem}.{k.path}"), code(k.value), k.comment) for path, options in options_of for k in options
    ]
    parts += [table("option or key, default, meaning", rows)]
    parts += ["\n## recipe and hardware\n\nSeveral keys at once, added with a plus: `plait train +hardware=laptop`.\n"]
    found = [path for root in (CONF, *ROOT.glob("plugins/*/src/*/conf")) for path in root.glob("*/*.yaml")]
    found = [path for path in found if path.parent.name in ("recipe", "hardware")]
    options = [(code(f"+{path.parent.name}={path.stem}"), header(path)) for path in found]
    parts += [table("option, what it is", sorted(options, reverse=True))]
    return "\n".join(parts) + "\n"


def packaged(path: Path, option: str, node: str) -> list[str]:
    """The options of a plugin's file."""
    plugin = path.relative_to(ROOT / "plugins").parts[0]
    rows = [(code(f"{node}.{k.path}"), code(k.value), k.comment) for k in keys_of(path) if k.path != "_target_"]
    return [f"\n{option} ([README](../plugins/{plugin}/README.md))\n", table("key, default, meaning", rows)]


def folder_of(name: str, option: str) -> Path:
    """The folder of a group's files that has this option: the core's, or a package's."""
    roots = (CONF, *ROOT.glob("plugins/*/src/*/conf"))
    return next(root / name for root in roots if (root / name / f"{option}.yaml").is_file())


def group(name: str, default: str, alike: bool = False) -> str:
    """The options of a config group, the default first, and one table of the keys that any of them explains.

    alike: all have the same keys, which are explained as in the default.
    """
    paths = sorted(folder_of(name, default).glob("*.yaml"), key=lambda path: (path.stem != default, path.stem))
    contents = {path.stem: {key.path: key for key in keys_of(path)} for path in paths}
    options, rows = [], []
    for path in paths:
        target = contents[path.stem].pop("_target_", Key("", "", ""))
        options.append((code(f"{name}={path.stem}"), header(path) or target.comment or code(target.value)))
    explained = dict.fromkeys((k.path, k.comment) for found in contents.values() for k in found.values() if k.comment)
    for key, comment in explained:
        if alike:
            if comment == contents[default][key].comment:
                rows.append((code(f"{name}.{key}"), code(contents[default][key].value), "all", comment))
            continue
        owners = {o: found[key] for o, found in contents.items() if key in found}
        owners = {o: own for o, own in owners.items() if own.comment in (comment, "")}
        values = list(dict.fromkeys(own.value for own in owners.values()))
        value = code(values[0]) + (", ..." if len(values) > 1 else "")
        rows.append((code(f"{name}.{key}"), value, "all" if len(owners) == len(paths) else ", ".join(owners), comment))
    title = f"\n## {name}\n"
    return "\n".join([title, table("option, what it is", options), "", table("key, default, of, meaning", rows)])


def hooks() -> str:
    rows = []
    for name, hook in vars(hookspecs).items():
        if hasattr(hook, "plait_spec"):
            kind = "fold" if name in hookspecs.FOLDS else "first result" if name in hookspecs.FIRST_RESULT else "all"
            arguments = ", ".join(inspect.signature(hook).parameters)
            rows.append((code(name), kind, code(arguments), " ".join(hook.__doc__.split())))
    strategy = markdown(inspect.cleandoc(hookspecs.__doc__ or "").partition(" A complete")[2])
    return filled("hooks", table=table("hook, kind, arguments, contract", rows), strategy=strategy)


def commands() -> str:
    shown = [f"## plait {name}\n\n```text\n{parser_of(name).format_help()}```" for name in COMMANDS if name != "train"]
    lines = table("command, what it does", [(code(f"plait {name}"), command_of(name).help) for name in COMMANDS])
    return COMMANDS_PAGE.format(table=lines, commands="\n\n".join(shown))


def kinds() -> str:
    rows = [(kind.name, code(kind.group), chosen(kind), kind.must) for kind in KINDS.values()]
    lines = table("kind, entry points, on the command line, what it must be", rows)
    source = [*of_members(Source), *of_members(Batches, "Batches.")]
    observer = [*of_members(Observer), *of_members(RunObserver)]
    return filled("kinds", table=lines, source="\n".join(source), observer="\n".join(observer))


def entries_of_reference() -> str:
    run = {key.path: key.comment for key in of_a_run()}
    nodes = [node for node in attrs.fields(Config) if attrs.has(node.type)]
    comments = {
        node.type: {key.name: run[f"{node.name}.{key.name}"] for key in attrs.fields(node.type)} for node in nodes
    }
    return filled("reference", entries=reference(comments))


def filled(name: str, **parts: str) -> str:
    """The page, which has each of these parts between `<!-- PART: ... -->` and `<!-- end of PART -->`."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for part, text in parts.items():
        before, mark, rest = re.split(rf"(<!-- {part}: .*? -->)", page, maxsplit=1)
        page = f"{before}{mark}\n\n{text}\n\n<!-- end of {part} -->{rest.split(f'<!-- end of {part} -->', 1)[1]}"
    return page


def chosen(kind: PluginKind) -> str:
    """How a command line chooses a plugin of this kind."""
    own = {"command": "plait NAME", "pruner": "sweep.prune=true"}
    choice = kind.choice or kind.key
    several = f"'{choice}=[NAME]'"
    return code(own.get(kind.name, "") or (several if kind.several else f"{choice}=NAME" if choice else ""))


def markdown(text: str) -> str:
    """A docstring whose indented parts are the code of a strategy, then tables of plain text."""
    parts = re.split(r"\n\n(?=\S)|(?<=:)\n\n(?=    )", f"A complete{text}")
    kinds = iter(("python",))
    return "\n\n".join(
        f"```{next(kinds, 'text')}\n{inspect.cleandoc(part)}\n```" if part.startswith("    ") else part
        for part in parts
    )


def pages() -> dict[Path, str]:
    """Path -> text of every generated page."""
    made = {"configuration": configuration(), "hooks": hooks(), "commands": commands(), "kinds": kinds()}
    made |= {"reference": entries_of_reference(), "board": board(records())}
    return {ROOT / "docs" / f"{name}.md": text for name, text in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
