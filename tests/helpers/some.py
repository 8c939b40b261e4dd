"""A pytest plugin: of each file every twelfth test function, with its first parameters; none is slow unless all are.

For suites in another environment or folder. What could be missing there is a module, a file or a dependency; that the
code is right is shown where it lies, by all tests.
"""

from typing import Any

import pytest


@pytest.hookimpl(trylast=True)  # after -m and -k, of what they leave
def pytest_collection_modifyitems(items: list[Any]) -> None:
    functions: dict[Any, dict[str, Any]] = {}
    quick = [item for item in items if not item.get_closest_marker("slow")]
    for item in quick or items:
        functions.setdefault(item.path, {}).setdefault(item.nodeid.partition("[")[0], item)
    items[:] = [item for found in functions.values() for item in list(found.values())[::12]]
