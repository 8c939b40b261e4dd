"""What ranks do that do not train: a function that `on_ranks` names, with arguments in a file of their folder."""

import json
import logging
import pkgutil
from pathlib import Path

from plait.contract.config import Config
from plait.records.run_folder import Outcome, RunFolder
from plait.system.imports import importing

TASK, ANSWER = "task.json", "answer.json"


def write_task(folder: Path, function: str, arguments: object) -> None:
    """function: MODULE:NAME. arguments: JSON values by name."""
    (folder / TASK).write_text(json.dumps({"function": function, "arguments": arguments}), encoding="utf-8")


def perform(folder: RunFolder, rank: int) -> Outcome:
    """The task of `folder` as one of its ranks. Rank 0 writes what the function returned, and the outcome."""
    with importing():
        from plait.parallel.process_group import device_of, end_group, start_group

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of what is slow, not wrong
    task = json.loads((folder.path / TASK).read_text(encoding="utf-8"))
    config = Config.of(folder.read_config())
    start_group(device_of(config.launch.device), config.launch.timeout_seconds)
    answer = pkgutil.resolve_name(task["function"])(config, **task["arguments"])
    outcome = Outcome("finished", "")
    if rank == 0:
        (folder.path / ANSWER).write_text(json.dumps(answer), encoding="utf-8")
        folder.set_outcome(outcome)
    end_group()
    return outcome
