"""`plait train`: compose once, check, and start the ranks or be one."""

import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from plait.compose import composed
from plait.errors import PlaitError


def main(argv: list[str]) -> int:
    """Run Hydra with these overrides; a sweep runs every job, and fails at its end if one of them did."""
    composed(job, argv)
    return 0


def job(cfg: DictConfig) -> None:
    """One run: Hydra's task function. Raises PlaitError with one sentence, or SystemExit for a signal's exit code."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    node: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    name = node["run"]["name"] or "-".join([str(hydra.runtime.choices.get("model", "model")), *node["strategy"]])
    node["run"]["name"] = name
    if hydra.mode != RunMode.MULTIRUN:
        _run(node, Path("runs") / name)
        return
    label = f"job {hydra.job.num} of the sweep ({hydra.job.override_dirname or 'no overrides'})"
    print(f"plait: {label} starts", flush=True)
    try:
        _run(node, Path(hydra.sweep.dir) / hydra.sweep.subdir)
    except Exception as error:
        reason = str(error) if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"
        print(f"plait: {label} failed: {reason}", file=sys.stderr, flush=True)
        raise PlaitError(f"{label} failed: {reason}") from None  # plain, so that it pickles between processes


def _run(node: dict[str, Any], path: Path) -> None:
    from plait.config import Launch
    from plait.folder import RunFolder
    from plait.launch import launch_mode
    from plait.schema import typed

    folder = RunFolder(path)
    if launch_mode(typed(Launch, node["launch"], "launch")) == "external":
        outcome = _be_a_rank(node, folder)
    else:
        outcome = _start_ranks(node, folder)
    if outcome.kind == "failed":
        where = f" (rank {outcome.rank}; its log: {folder.log_of(outcome.rank)})" if outcome.rank is not None else ""
        raise PlaitError(outcome.reason + where)
    _say(outcome.reason)
    if outcome.kind == "stopped":
        raise SystemExit(143)


def _start_ranks(node: dict[str, Any], folder: Any) -> Any:
    from plait.check import check
    from plait.launch import start_ranks

    if folder.path.exists():  # a live run is refused at once; a new folder waits until all is checked
        folder.lock()
    checked = check(node)
    config = checked.config
    axes = " x ".join(f"{a.name}={a.degree}" for a in checked.layout.dense) or "no mesh axes"
    _say(f"launch: local, {checked.ranks_per_node} rank(s) here of {checked.layout.world_size}; {axes}")
    prepared = _prepare(checked, folder)
    if prepared is not None:
        return prepared
    checked.source.prepare(_say)
    checked.source.fits(seq_len=config.train.seq_len)
    return start_ranks(config, folder, checked.ranks_per_node, _say)


def _be_a_rank(node: dict[str, Any], folder: Any) -> Any:
    """Rank 0 composes and checks for all: the others might see other files or defaults."""
    import torch.distributed as dist

    from plait.check import check
    from plait.config import Launch
    from plait.distributed import device_of, end_group, start_group
    from plait.folder import RunFolder
    from plait.rank import live
    from plait.schema import typed

    launch = typed(Launch, node["launch"], "launch")
    start_group(device_of(launch.device), launch.timeout_seconds + 60)
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        _say(f"launch: external, {dist.get_world_size()} rank(s)")
        try:
            checked = check(node, dist.get_world_size())
            shared = [(str(folder.path), _prepare(checked, folder), None)]
        except PlaitError as error:
            shared = [(None, None, str(error))]
    dist.broadcast_object_list(shared, src=0)
    path, ended, problem = shared[0]
    if problem is None and ended is None:
        outcome = live(RunFolder(Path(path)))
    elif dist.get_rank() == 0 and problem is not None:
        end_group()
        raise PlaitError(problem)
    else:
        end_group()
        outcome = ended
    if os.environ["RANK"] != "0":  # rank 0 tells the user
        raise SystemExit({"finished": 0, "stopped": 143}.get(outcome.kind, 1) if outcome else 1)
    return outcome


def _prepare(checked: Any, folder: Any) -> Any:
    """Take the run's folder: lock, see what is there to resume, write what the ranks read. An outcome ends it here."""
    from plait.checkpointing import look
    from plait.folder import Outcome, versions_of

    folder.lock()
    found = look(checked, folder, _say)
    if found.finished:
        reason = f"{folder.path.name} is finished at step {found.step}: raise train.steps, or set another run.name"
        return Outcome("finished", reason, step=found.step)
    folder.clear_outcome()
    folder.write_config(checked.node)
    folder.write_versions(versions_of(checked.distributions))
    _say(f"run: {folder.path}")
    return None


def _say(text: str) -> None:
    print(text, flush=True)
