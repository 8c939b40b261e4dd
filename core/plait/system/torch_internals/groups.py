"""Process groups: `torch.distributed.distributed_c10d` and the backends below it.

Needs `_world.pg_map` (all groups), `_set_pg_timeout`, `_get_default_store`, the `FakeStore` of torch's own tests, and
`_dump_fr_trace_json` (gloo, 2.11) or `_dump_nccl_trace_json`: all in torch 2.11 to 2.15. Tests:
tests/system/test_torch_internals.py.
"""

import datetime
import sys
from collections.abc import Callable
from typing import Any

_RECORDERS = {"_dump_fr_trace_json": "gloo", "_dump_nccl_trace_json": "nccl"}  # each backend has its own


def all_groups() -> list[Any]:
    """Every process group that this process is in."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def set_timeout(group: Any, seconds: float) -> None:
    """Let collectives of `group` that begin from now on take so long."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def default_store() -> Any:
    """The store of the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def fake_store() -> Any:
    """The store of the backend "fake", whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flight_recorders() -> dict[str, Callable[[], bytes | None]]:
    """Backend -> what dumps its flight recorder as JSON; none if torch.distributed has not been imported."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = {backend: getattr(c10d, name, None) for name, backend in _RECORDERS.items()}
    return {backend: dump for backend, dump in dumps.items() if dump is not None}
