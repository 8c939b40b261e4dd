"""How this repository runs its tests: what is left to `make test-all`, and what one of two processes has to itself."""

import gc
import os
import signal
import tempfile
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

# On some CPUs (an AMD EPYC, say) MKL rounds a product by where its operands lie in memory: two strategies that add in
# one order then differ in the last bit of float32. Set before torch is imported, and inherited by the ranks.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# Cases of tests of which others stay quick: two quick tests or more run each of their lines (docs/testing.md).
REPEATS = frozenset(Path(__file__).with_name("tests").joinpath("repeats.txt").read_text("utf-8").splitlines())

# What a run keeps on its machine for later ones must not reach a test from elsewhere, nor another one's process.
_CACHE = tempfile.TemporaryDirectory(prefix="plait-cache-")
os.environ["PLAIT_CACHE"] = _CACHE.name

# A job of `nohup`, or in a shell's background, begins with these ignored, and so would the runs that tests interrupt.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of plugins that are installed no longer as they stand in the source would fail for another reason."""
    core = Path(__file__).with_name("core") / "pyproject.toml"
    points_of = tomllib.loads(core.read_text(encoding="utf-8"))["project"]["entry-points"]
    here = {(group, *point) for group, points in points_of.items() for point in points.items()}
    installed = {(point.group, point.name, point.value) for point in distribution("plait-core").entry_points}
    if other := here ^ {point for point in installed if point[0] != "console_scripts"}:
        names = ", ".join(f"{group} {name}" for group, name, _ in sorted(other))
        raise pytest.UsageError(
            f"core/pyproject.toml has other entry points than are installed: {names}; "
            "run: python -m pip install --no-deps --no-build-isolation -e ./core"
        )


def pytest_itemcollected(item: Any) -> None:
    if item.nodeid in REPEATS:
        item.add_marker(pytest.mark.slow)
    if item.name.startswith("test_composes_with") and _has_a_like(item.cls.strategy, item.callspec.params["other"]):
        item.add_marker(pytest.mark.slow)
    # one pool of ranks, beside tests that start none; one undisturbed run for all who look at it
    shared = {"plait_ranks": "ranks", "watched": "undisturbed"}
    used = [group for fixture, group in shared.items() if fixture in getattr(item, "fixturenames", ())]
    item.add_marker(pytest.mark.xdist_group(used[0] if used else item.path.name))


def _has_a_like(strategy: str, other: str | None) -> bool:
    """Whether another test tries the pair: the suite of the other one, or the tests of the one that extends models."""
    from plait_testing.strategies import extending

    return other is not None and (other < strategy or bool(extending({strategy: {}, other: {}})))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # what was imported and collected stays: no collection needs to look at it
    gc.set_threshold(20_000, 20)  # instead of 700: a twentieth of the time of tests that compose configs
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist keeps no groups under this pytest: two pools would fight for cores")
