"""A process group of any size with one rank in it: for what can be known of a run without its ranks."""

import torch.distributed as dist


class simulated:
    """A process group of `world_size` ranks of which only this process exists; its collectives do nothing."""

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size, self.rank = world_size, rank

    def __enter__(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.world_size)

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()
