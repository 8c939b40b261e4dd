"""What the files of `conf/` say of each key."""

import re
from collections.abc import Iterator
from importlib.resources import files

import attrs

LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#\s][^#]*?))?(?: +# (?P<comment>.*))?$")


@attrs.frozen
class Key:
    """A line of a YAML file: `a.b: value # comment`."""

    path: str
    value: str
    comment: str


def keys(text: str) -> Iterator[Key]:
    """Every key of a config file with this text, with its comment; the defaults list is left out."""
    parents: list[str] = []
    for line in text.splitlines():
        if found := LINE.match(line):
            depth = len(found["indent"]) // 2
            parents[depth:] = [found["key"]]
            if parents[0] != "defaults":
                yield Key(".".join(parents), found["value"] or "", found["comment"] or "")


def of_a_run() -> list[Key]:
    """Those of `conf/train.yaml`."""
    return list(keys(files("plait.conf").joinpath("train.yaml").read_text(encoding="utf-8")))
