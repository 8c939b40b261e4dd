"""How this repository runs its tests: what is left to `make test-all`, and what one of two processes has to itself."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    if layouts := getattr(getattr(item, "cls", None), "layouts", None):
        if item.name.startswith("test_checkpoint_loads_in_every_other") and len(layouts) > 4:
            item.add_marker(pytest.mark.slow)  # each into each
        if item.name.startswith("test_killed_and_resumed") and item.cls.strategy != "fsdp2":
            item.add_marker(pytest.mark.slow)  # three starts of `plait train`: once is enough
    # one pool of ranks, beside tests that start none
    group = "ranks" if "plait_ranks" in getattr(item, "fixturenames", ()) else item.path.name
    item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist keeps no groups under this pytest: two pools would fight for cores")
