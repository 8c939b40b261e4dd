"""Writes configuration.md, from the comments in conf/, and hooks.md, from the hookspecs: `python docs/generate.py`."""

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from plait.contract import hookspecs

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#\s][^#]*?))?(?: +# (?P<comment>.*))?$")

CONFIGURATION = """\
# Configuration

<!-- written by docs/generate.py from the comments in conf/: change those -->

Every key can be set on the command line: `plait train train.steps=100 model.dim=512`. `plait train --cfg job` prints
what a command comes to, without running it. A list in brackets needs quotes in most shells: `'strategy=[fsdp2]'`.
A default of `???` must be given. Options of your own are files `./conf/<group>/<option>.yaml`, or lie under
`--config-dir`.

A value must have the type of its key, exactly: `true` is no number, `1` is no `true`, `1.5` and `1e3` are no whole
numbers, and text that looks like a number needs quotes of its own (`'run.name="1.10"'`). What does not fit, an unknown
key, and a key that was deleted (`~train.steps`) end the command with one sentence that names the key, before anything
is written.

## A run
"""

HOOKS = """\
# The hooks

<!-- written by docs/generate.py from core/plait/contract/hookspecs.py: change that -->

The whole contract between the core and a strategy, API version {api}. [Strategies](strategies.md) shows it in use, and
[architecture](architecture.md) says why each hook has its shape.

{table}

A method takes any subset of the arguments, by name. *All*: everyone who implements it is called, in order. *Fold*: each
strategy gets what the one before it left. *First result*: at most one selected strategy implements it, and where none
does the core has an answer of its own.

{strategy}

```text
{attributes}
```
"""


@attrs.frozen
class Key:
    """A line of a YAML file: `a.b: value # comment`."""

    path: str
    value: str
    comment: str


def keys(path: Path) -> Iterator[Key]:
    """Every key of a config file, with its comment; the defaults list is left out."""
    parents: list[str] = []
    for line in path.read_text().splitlines():
        if found := LINE.match(line):
            depth = len(found["indent"]) // 2
            parents[depth:] = [found["key"]]
            if parents[0] != "defaults":
                yield Key(".".join(parents), found["value"] or "", found["comment"] or "")


def header(path: Path) -> str:
    """The comment that a file begins with, without Hydra's directive."""
    lines = []
    for line in path.read_text().splitlines():
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
    run = list(keys(CONF / "train.yaml"))
    nodes = {key.path.partition(".")[0] for key in run if "." in key.path}
    rows = [
        (f"**{key.path}**" if key.path in nodes else code(key.path), code(key.value), key.comment)
        for key in run
        if key.path in nodes or key.comment
    ]
    parts = [CONFIGURATION, table("key, default, meaning", rows)]
    defaults = dict(re.findall(r"^  - (\w+): (\w+)$", (CONF / "train.yaml").read_text(), re.MULTILINE))
    parts += [group(name, defaults[name]) for name in ("model", "data", "optimizer")]
    parts += [group("cluster", "h100", alike=True)]
    parts += ["\n## strategy\n\nEach comes with an installed package. Those of this repository:"]
    for path in sorted(ROOT.glob("plugins/*/src/*/conf/strategy/*.yaml")):
        plugin = path.relative_to(ROOT / "plugins").parts[0]
        parts += [f"\n`'strategy=[{path.stem}]'` ([README](../plugins/{plugin}/README.md))\n"]
        rows = [(code(f"strategy.{path.stem}.{key.path}"), code(key.value), key.comment) for key in keys(path)]
        parts += [table("key, default, meaning", rows)]
    parts += ["\n## recipe and hardware\n\nSeveral keys at once, added with a plus: `plait train +hardware=laptop`.\n"]
    found = [path for root in (CONF, *ROOT.glob("plugins/*/src/*/conf")) for path in root.glob("*/*.yaml")]
    found = [path for path in found if path.parent.name in ("recipe", "hardware")]
    options = [(code(f"+{path.parent.name}={path.stem}"), header(path)) for path in found]
    parts += [table("option, what it is", sorted(options, reverse=True))]
    return "\n".join(parts) + "\n"


def group(name: str, default: str, alike: bool = False) -> str:
    """The options of a config group, the default first, and one table of the keys that any of them explains.

    alike: all have the same keys, which are explained as in the default.
    """
    paths = sorted((CONF / name).glob("*.yaml"), key=lambda path: (path.stem != default, path.stem))
    contents = {path.stem: {key.path: key for key in keys(path)} for path in paths}
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
            rows.append((code(name), kind, code(arguments), inspect.cleandoc(hook.__doc__)))
    _, strategy, attributes, *_ = inspect.cleandoc(hookspecs.__doc__ or "").split("\n\n")
    return HOOKS.format(
        api=hookspecs.API,
        table=table("hook, kind, arguments, contract", rows),
        strategy=strategy,
        attributes=inspect.cleandoc(attributes),
    )


def pages() -> dict[Path, str]:
    """Path -> text of every generated page."""
    return {ROOT / "docs" / "configuration.md": configuration(), ROOT / "docs" / "hooks.md": hooks()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
