"""`plait train` on one rank, as a launcher of one rank calls it: a whole run in about two seconds."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.helpers.commands import SMALL, Done, plait

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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
