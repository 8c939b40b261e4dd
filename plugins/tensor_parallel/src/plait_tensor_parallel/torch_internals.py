"""The only file of this package that uses what torch keeps private.

Needs `torch.distributed.tensor._utils.ExplicitRedistributionContext`, from torch 2.12; `_symmetric_memory` and
inductor's `_micro_pipeline_tp`, in torch 2.11 to 2.15. Test: plugins/tensor_parallel/tests/test_options.py.
"""

from contextlib import AbstractContextManager
from typing import Any


def explicit_redistribution() -> Any:
    """Makes contexts in which DTensor moves no data that was not asked for; None if torch has none."""
    try:
        from torch.distributed.tensor._utils import ExplicitRedistributionContext
    except ImportError:
        return None
    return ExplicitRedistributionContext


def allow_overlap(group: str) -> None:
    """Let ranks of the process group of this name write into each other's memory."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    name: Any = group  # torch's stubs have a type of their own for it
    enable_symm_mem_for_group(name)


def overlapping() -> AbstractContextManager[Any]:
    """Inside, inductor splits collectives and matrix products into pieces that overlap."""
    import torch._inductor.config as inductor

    return inductor.patch(_micro_pipeline_tp=True)
