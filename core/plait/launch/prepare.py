"""What one process does for all before training: take the run's folder, find what to resume, write what ranks read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait.contract.config import Launch
from plait.contract.errors import DiskError, PlaitError, one_line, shown
from plait.contract.schema import typed
from plait.launch.check import Checked, check
from plait.launch.resume import look
from plait.records.run_folder import Outcome, RunFolder, versions_of
from plait.system.disk import can_be_written, reading, replace

Say = Callable[[str], None]


def prepare(checked: Checked, folder: RunFolder, say: Say, first: Callable[[], None] | None = None) -> Outcome | None:
    """Lock the folder and make it ready for the ranks; an outcome means that there is nothing left to train.

    first: what else may find that the run cannot be, called before a new folder is made.
    Raises PlaitError where a live run holds the folder, or what it would resume does not fit.
    """
    new = not folder.path.exists()
    if not new:
        folder.lock()
        folder.check()
    with reading(checked.config.checkpoint.dir, "checkpoint.dir"):
        found = look(checked, folder, say)  # what it refuses leaves no new folder behind
    if found.finished:
        reason = f"{folder.path.name} is finished at step {found.step}: raise train.steps, or set another run.name"
        return Outcome("finished", reason, step=found.step)
    if first:
        first()
    try:
        folder.lock()
        folder.clear_outcome()
        folder.write_config(checked.node)
        for name, text in checked.files.items():
            replace(folder.path / name, text)
        folder.write_versions(versions_of(checked.distributions))
        folder.write_mesh(checked.layout.as_json())
        if checked.config.checkpoint.enabled:
            directory = checked.config.checkpoint.dir
            can_be_written(folder.checkpoints(directory), f"checkpoint.dir={shown(directory)}:")
    except DiskError:
        if new:
            folder.discard()
        raise
    for line, _ in checked.said:
        say(line)
    say(f"run: {folder.path}")
    return None


def prepare_together(node: Mapping[str, Any], folder: RunFolder, say: Say) -> tuple[RunFolder, Outcome | None]:
    """The same in ranks that a launcher started: rank 0 checks and prepares for all, who might see other files.

    Starts the process group. Returns the folder on all ranks. Raises PlaitError on all where rank 0 meets one.
    """
    import torch.distributed as dist

    from plait.parallel.process_group import device_of, end_group, start_group

    launch = typed(Launch, node["launch"], "launch")
    start_group(device_of(launch.device), launch.timeout_seconds + 60)  # after the watchdog has written its stacks
    shared: list[Any] = [None, None, None]
    if dist.get_rank() == 0:
        try:
            checked = check(node, dist.get_world_size(), folder.path)
            shared = [str(folder.path), prepare(checked, folder, say), None]
        except (PlaitError, OSError) as error:
            shared = [None, None, one_line(error)]
    dist.broadcast_object_list(shared, src=0)
    path, ended, problem = shared
    if problem is not None or ended is not None:
        end_group()
    if problem is not None:
        raise PlaitError(problem)
    return folder if dist.is_initialized() and dist.get_rank() == 0 else RunFolder(Path(path)), ended
