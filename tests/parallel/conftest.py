"""What tests share that run the core in their own process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def own_group() -> Iterator[None]:
    """A process group that `plait.apply` starts in this process: other tests do not meet it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
