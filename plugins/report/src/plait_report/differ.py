"""The keys in which the configs of several runs differ."""

from collections.abc import Mapping
from typing import Any

ABSENT = "–"
NOT_COUNTED = ("run.name", "sweep.")


def differing(configs: list[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(dotted key, its value in each) for every key that is not the same in all; empty configs are ignored."""
    leaves = [dict(flat(config)) for config in configs]
    keys = sorted({key for each in leaves for key in each if not key.startswith(NOT_COUNTED)})
    rows = [(key, [_shown(each[key]) if key in each else ABSENT for each in leaves]) for key in keys]
    return [(key, values) for key, values in rows if len({v for v, f in zip(values, leaves, strict=True) if f}) > 1]


def flat(node: Any, key: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    if not isinstance(node, Mapping) or (not node and key):
        return [(key, node)]
    leaves = []
    for name, value in node.items():
        leaves += flat(value, f"{key}.{name}" if key else str(name))
    return leaves


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
