"""Bugs planted in a copy of Plait and its strategies, and ranks that run that copy instead of what is installed."""

import contextlib
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import cloudpickle

from plait_testing.pool import Pool
from tests.helpers.fakes import forget

ROOT = Path(__file__).parents[2]
SOURCES = ("core", *(str(p.relative_to(ROOT)) for kind in ("plugins", "examples") for p in ROOT.glob(f"{kind}/*/src")))


@attrs.frozen
class Mutant:
    """One small change, and the test of the suite that must fail because of it, saying what is wrong.

    bug: what went wrong in real systems. file: below one of the source folders. old, new: the change; `old` stands
    there once. test: of the conformance suite. on: the arguments of that test. says: part of how it fails.
    """

    bug: str
    file: str
    old: str
    new: str
    test: str
    says: str
    strategy: str = "fsdp2"
    on: dict[str, Any] = attrs.Factory(dict)
    timeout: float | None = None


def copied(folder: Path, mutant: Any = None) -> list[str]:
    """Copy all sources into `folder`, with the bug of `mutant`, which has a file, `old` and `new` as `Mutant` does;
    returns the folders to import from."""
    places = []
    for source in SOURCES:
        shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        places.append(str(folder / source))
    if mutant is not None:
        (path,) = [Path(place, mutant.file) for place in places if Path(place, mutant.file).exists()]
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} times {mutant.old!r}, not once"
        path.write_text(text.replace(mutant.old, mutant.new))
    return places


# Not from the copy: a process registers an operator once, and keeps it.
OPERATORS = ("plait.ops.grouped", "plait.ops.added_loss")


class Planted:
    """Stands in for a pool of ranks: what it runs, runs on the copy."""

    def __init__(self, pool: Pool, places: list[str], timeout: float | None = None) -> None:
        self.pool, self.places, self.timeout, self.size = pool, places, timeout, pool.size
        self.kept: dict[str, Any] = {}

    def run(self, fn: Any, *args: Any, world: int, **kwargs: Any) -> list[Any]:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        payload = cloudpickle.dumps((fn, args, kwargs))
        answers = self.pool.run(_on_copy, self.places, payload, world=world, timeout=self.timeout)
        return [cloudpickle.loads(answer) for answer in answers]

    once = Pool.once

    @contextlib.contextmanager
    def fresh(self, world: int) -> Iterator["Planted"]:
        with self.pool.fresh(world) as pool:
            yield type(self)(pool, self.places, self.timeout)


class Beside(Planted):
    """Stands in for a pool of ranks: what it runs finds the packages in `places` too, beside the Plait that is here."""

    def run(self, fn: Any, *args: Any, world: int, **kwargs: Any) -> list[Any]:
        payload = cloudpickle.dumps((fn, args, kwargs))
        answers = self.pool.run(_beside, self.places, payload, world=world, timeout=self.timeout)
        return [cloudpickle.loads(answer) for answer in answers]


def _beside(places: list[str], payload: bytes) -> bytes:
    sys.path[:0] = places
    importlib.invalidate_caches()
    try:
        fn, args, kwargs = cloudpickle.loads(payload)
        return cloudpickle.dumps(fn(*args, **kwargs))
    finally:
        for place in places:
            sys.path.remove(place)
            forget(Path(place))


def _on_copy(places: list[str], payload: bytes) -> bytes:
    for name in OPERATORS:
        importlib.import_module(name)
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0].partition("_")[0] == "plait"}
    before = list(sys.path)
    for name in ours:
        if name not in OPERATORS:
            del sys.modules[name]
    sys.path[:0] = places
    importlib.invalidate_caches()
    try:
        fn, args, kwargs = cloudpickle.loads(payload)
        assert sys.modules["plait"].__file__.startswith(places[0])
        return cloudpickle.dumps(fn(*args, **kwargs))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0].partition("_")[0] == "plait"]:
            del sys.modules[name]
        sys.modules.update(ours)
        sys.path[:] = before
