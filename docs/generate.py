"""Writes docs/configuration.md from the comments in conf/ and docs/hooks.md from hookspecs.py: `python docs/generate.py`."""

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from plait import hookspecs

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#\s][^#]*?))?(?: +# (?P<comment>.*))?$")
NOTE = "<!-- written by docs/generate.py; change {source} instead -->\n"


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


def table(rows: Iterable[tuple[str, ...]], *titles: str) -> list[str]:
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *(f"| {' | '.join(row)} |" for row in cells)]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        NOTE.format(source="the comments in conf/"),
        "Every key can be set on the command line: `plait train train.steps=100 model.dim=512`. `plait train --cfg job`",
        "prints what a command comes to without running it. A list in brackets needs quotes in most shells:",
        "`'strategy=[fsdp2]'`. Your own options lie in `./conf/<group>/<option>.yaml`, or under `--config-dir`.",
        "",
        "## A run",
        "",
    ]
    run = list(keys(CONF / "train.yaml"))
    nodes = {key.path.split(".")[0] for key in run if "." in key.path}
    rows = []
    for key in run:
        if key.path in nodes:
            rows.append((f"**{key.path}**", "", key.comment))
        elif key.comment:
            rows.append((code(key.path), code(key.value), key.comment))
    lines += [*table(rows, "key", "default", "meaning"), ""]
    defaults = dict(re.findall(r"^  - (\w+): (\w+)$", (CONF / "train.yaml").read_text(), re.MULTILINE))
    for group in ("model", "data", "optimizer"):
        lines += section(group, defaults[group])
    lines += ["## strategy", "", "Each option comes with an installed package; these are the ones of this repository.", ""]
    for path in sorted(ROOT.glob("plugins/*/src/*/conf/strategy/*.yaml")):
        rows = [(code(f"strategy.{path.stem}.{k.path}"), code(k.value), k.comment) for k in keys(path)]
        lines += [f"`'strategy=[{path.stem}]'` ({path.relative_to(ROOT).parts[1]}):", ""]
        lines += [*table(rows, "key", "default", "meaning"), ""]
    lines += ["## recipe and hardware", "", "Several keys at once, added with a plus: `plait train +hardware=laptop`.", ""]
    paths = [*CONF.glob("recipe/*.yaml"), *ROOT.glob("plugins/*/src/*/conf/recipe/*.yaml"), *CONF.glob("hardware/*.yaml")]
    rows = [(code(f"+{path.parent.name}={path.stem}"), header(path)) for path in paths]
    lines += table(sorted(rows, reverse=True), "option", "what it is")
    return "\n".join(lines) + "\n"


def section(group: str, default: str) -> list[str]:
    """The options of a group, and one table of the keys that any of them has."""
    paths = sorted((CONF / group).glob("*.yaml"), key=lambda p: (p.stem != default, p.stem))
    options, found = [], {}
    for path in paths:
        for key in keys(path):
            if key.path == "_target_":
                options.append((f"`{group}={path.stem}`", header(path) or key.comment or code(key.value)))
            elif key.comment:
                found.setdefault((key.path, key.comment), []).append((path.stem, key.value))
    rows = []
    for (path, comment), owners in found.items():
        names = ", ".join(name for name, _ in owners)
        values = list(dict.fromkeys(value for _, value in owners))
        rows.append((code(f"{group}.{path}"), ", ".join(map(code, values)), names, comment))
    lines = [f"## {group}", "", *table(options, "option", "what it is"), ""]
    return [*lines, *table(rows, "key", "default", "in", "meaning"), ""]


def hooks() -> str:
    contract = inspect.cleandoc(hookspecs.__doc__ or "").split("\n\n")
    rows = []
    for name, hook in vars(hookspecs).items():
        if hasattr(hook, "plait_spec"):
            kind = "fold" if name in hookspecs.FOLDS else "first result" if name in hookspecs.FIRST_RESULT else "all"
            arguments = ", ".join(inspect.signature(hook).parameters)
            rows.append((code(name), kind, code(arguments), inspect.cleandoc(hook.__doc__)))
    lines = [
        "# The hooks",
        "",
        NOTE.format(source="core/plait/hookspecs.py"),
        f"The whole contract between the core and a strategy, API version {hookspecs.API}. [How to write a strategy]"
        "(strategies.md) shows it in",
        "use, and [architecture](architecture.md) says why each hook has its shape.",
        "",
        *table(rows, "hook", "kind", "arguments", "contract"),
        "",
        "A method takes any subset of the arguments, by name. *All*: everyone who implements it is called, in order. *Fold*:",
        "each strategy gets what the one before it left. *First result*: at most one selected strategy implements it;",
        "the core has its own answer where none does.",
        "",
        *contract[1].splitlines(),
        "",
        "```text",
        *inspect.cleandoc(contract[2]).splitlines(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Path -> text of every generated page."""
    return {ROOT / "docs" / "configuration.md": configuration(), ROOT / "docs" / "hooks.md": hooks()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
