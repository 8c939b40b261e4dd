"""A run of recovery.py by another library, under torchrun: python benchmarks/recovery_loop.py PEER [overrides]

PEER is dcp (torch alone, with `fully_shard` and torch.distributed.checkpoint), fabric or accelerate. Each saves every
`checkpoint.interval` steps, and goes on from what it saved last, as its library's documentation shows it.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bare_loop import BareLoop
from peers_run import Config, built, loss_of

SAVED = Path("saved")


def latest() -> int:
    """The step that was saved last, 0 without one."""
    return max((int(path.name) for path in SAVED.glob("*") if path.name.isdecimal()), default=0)


def commit(written: Path, step: int) -> None:
    """Let it be the one that is found, on rank 0; keep the one before."""
    dist.barrier()
    if dist.get_rank() == 0:
        written.rename(SAVED / str(step))
        for path in SAVED.glob("*"):
            if path.name.isdecimal() and int(path.name) < step:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def train(config: Config, start: int, step_of: Callable[[int], float], save: Callable[[Path], Any]) -> None:
    if start and dist.get_rank() == 0:
        print(f"resumed after step {start}", flush=True)
    for step in range(start + 1, config["train"]["steps"] + 1):
        loss = step_of(step)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.4f}", flush=True)
        if step % config["checkpoint"]["interval"] == 0:
            written = SAVED / f"{step}.tmp"
            save(written)
            commit(written, step)


def batches(config: Config) -> Any:
    from hydra.utils import instantiate

    options, world = config["train"], dist.get_world_size()
    size = options["local_batch_size"] * world
    given = {"seq_len": options["seq_len"], "seed": options["seed"], "dp": (dist.get_rank(), world)}
    return instantiate(config["data"]).open(global_batch_size=size, **given)


def dcp(config: Config) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo")
    loop = BareLoop(config)

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(loop.model, loop.optimizer)
        return {"model": model, "optimizer": optimizer}

    if start := latest():
        checkpoint.load(read := state(), checkpoint_id=SAVED / str(start))
        set_state_dict(
            *(loop.model, loop.optimizer), model_state_dict=read["model"], optim_state_dict=read["optimizer"]
        )
        loop.steps = start
    train(config, start, lambda step: loop.step(), lambda path: checkpoint.save(state(), checkpoint_id=path))


def fabric(config: Config) -> None:
    from lightning_fabric import Fabric

    here, world = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    fabric = Fabric(accelerator="cpu", devices=here, num_nodes=world // here, strategy="ddp")
    fabric.launch()
    model, optimizer, schedule = built(config)
    model, optimizer = fabric.setup(model, optimizer)
    opened = batches(config)
    if start := latest():
        fabric.load(SAVED / str(start), {"model": model, "optimizer": optimizer, "schedule": schedule})

    def step_of(step: int) -> float:
        batch = opened.train(step - 1)
        loss = loss_of(model, batch.tokens, batch.labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=config["train"]["max_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.item()

    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    train(config, start, step_of, lambda path: fabric.save(path, state))


def accelerate(config: Config) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule = built(config)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    opened = batches(config)
    if start := latest():
        accelerator.load_state(str(SAVED / str(start)))

    def step_of(step: int) -> float:
        batch = opened.train(step - 1)
        loss = loss_of(model, batch.tokens, batch.labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), config["train"]["max_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.item()

    train(config, start, step_of, lambda path: accelerator.save_state(str(path)))


PEERS = {"dcp": dcp, "fabric": fabric, "accelerate": accelerate}


def main() -> None:
    from plait.host import compose

    PEERS[sys.argv[1]](compose(sys.argv[2:]).plain())


if __name__ == "__main__":
    main()
