"""A source inside another one's config: its class, and whose its errors are."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from plait import PlaitError, near_miss


def with_target(node: Mapping[str, Any], key: str, without: tuple[str, ...]) -> dict[str, Any]:
    """The config `node` of a source, which `key` holds, with the class of its `kind` as `_target_`.

    without: names of installed sources that do not fit there. Raises PlaitError for a kind that is not installed.
    """
    if "kind" not in node:
        return dict(node)
    known = {each.name: each.value.replace(":", ".") for each in entry_points(group="plait.sources")}
    names = sorted(known.keys() - {*without})
    if (kind := node["kind"]) not in names:
        raise PlaitError(
            f"{key}.kind={kind} is none of the installed sources that fit here: {', '.join(names)}"
            f"{near_miss(str(kind), names)}"
        ).at(f"{key}.kind", kind, fits=names)
    return {"_target_": known[kind], **{name: value for name, value in node.items() if name != "kind"}}


def tells_apart(source: Any) -> bool:
    """Whether batches of `source` may have positions: tokens see none but their document, or it does not say."""
    return getattr(source, "attention", "document") != "across"


@contextmanager
def naming(key: str, *own: str) -> Iterator[None]:
    """Errors inside are those of the source whose config `key` holds: keys that they name are of that config, but for
    the names `own`, which are of the config around it."""
    shared = "|".join(rf"{name}\b" for name in ("sources?", *own))
    try:
        yield
    except PlaitError as error:
        said = re.sub(rf"\bdata\.(?!{shared})(?=\w)", f"{key}.", str(error))
        if error.key is not None and re.match(rf"data\.(?!{shared})", error.key):
            error.args = (said,)
            error.key = f"{key}.{error.key.removeprefix('data.')}"
        elif key not in str(error) and error.key not in {f"data.{name}" for name in own}:
            error.args = (f"{key}: {said}",)
        raise
