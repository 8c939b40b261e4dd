"""`plait train` on one rank, as a launcher of one rank calls it: a whole run in about two seconds."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.helpers.commands import SMALL, Done, free_port, plait

OVERRIDES = (
    *SMALL,
    *("strategy=[]", "model.n_heads=2", "model.n_kv_heads=1", "train.steps=20", "validation.interval=0"),
)


def train(*overrides: str, cwd: Path, meanwhile: Callable[[], Any] = lambda: None, **env: str) -> Done:
    """How it ended. meanwhile: called here while it runs."""
    with ThreadPoolExecutor() as pool:
        run = pool.submit(plait, "train", *OVERRIDES, *overrides, cwd=cwd, timeout=120, **launched(), **env)
        meanwhile()
        return run.result()


def launched() -> dict[str, str]:
    """What a launcher of one rank tells it."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
