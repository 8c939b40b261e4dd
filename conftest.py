"""How this repository runs its tests: what is left to `make test-all`, and what one of two processes has to itself."""

import os

import pytest

# On some CPUs (an AMD EPYC, say) MKL rounds a product by where its operands lie in memory: two strategies that add in
# one order then differ in the last bit of float32. Set before torch is imported, and inherited by the ranks.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")


def pytest_itemcollected(item: pytest.Item) -> None:
    if getattr(getattr(item, "cls", None), "layouts", None) and _leave_to_all(item, item.cls.strategy):
        item.add_marker(pytest.mark.slow)
    # one pool of ranks, beside tests that start none
    group = "ranks" if "plait_ranks" in getattr(item, "fixturenames", ()) else item.path.name
    item.add_marker(pytest.mark.xdist_group(group))


def _leave_to_all(item: pytest.Item, strategy: str) -> bool:
    """Of the suite: what takes long, and has a like that `make test` runs."""
    if item.name.startswith(("test_checkpoint_loads_in", "test_killed_and_resumed")):
        return strategy != "fsdp2"  # each layout into each, and three starts of `plait train`
    if item.name.startswith("test_composes_with"):
        return (item.callspec.params["other"] or "") < strategy  # a pair once
    return item.name.startswith("test_compiled_equals")  # beside the same, recomputed


def pytest_collection_finish(session: pytest.Session) -> None:
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist keeps no groups under this pytest: two pools would fight for cores")
