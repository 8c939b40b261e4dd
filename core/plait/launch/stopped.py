"""The state of a run that a signal ended: which step it reached, and which one is saved."""

import contextlib
from signal import SIGINT, SIGTERM

from plait.checkpoint.at_address import open_store
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.records.run_folder import Outcome, RunFolder
from plait.system.signals import name


def stopped_outcome(
    config: Config,
    folder: RunFolder,
    number: int | None,
    overdue: bool = False,
    impatient: bool = False,
    leaves: bool = False,
) -> Outcome:
    """Writes and returns the outcome of a run that signal `number` ended, from its ranks and checkpoints.

    overdue: ranks were killed because they did not end in the grace time. impatient: the user had them killed.
    leaves: others go on, so this is not the run's outcome, and is not written.
    """
    own = folder.outcome()
    if own is not None and own.kind != "stopped":
        return own  # it ended before the signal could change anything
    reason, step = f"stopped by {name(number) if number else 'a signal'}", own.step if own is not None else None
    complete = []
    if step is None:
        remove_half_done(config, folder)
    with contextlib.suppress(PlaitError):  # a folder that cannot be read
        complete = open_store(folder.checkpoints(config.checkpoint.dir)).complete()
    last = f"the last complete checkpoint is {complete[-1].name}" if complete else "no checkpoint was saved yet"
    if step is not None:
        reason += f" after step {step}"
    elif impatient:
        reason += f"{' twice' if number == SIGINT else ' and then by SIGINT'}: its ranks were killed at once"
    elif overdue:
        reason += (
            f": its ranks did not finish a step and save it within launch.grace_seconds="
            f"{config.launch.grace_seconds:g}, and were killed"
        )
    if not config.checkpoint.enabled:
        reason += "; nothing was saved (checkpoint.enabled=false)"
    elif step is not None and any(path.name == f"step-{step}" for path in complete):
        reason += f"; saved step {step}"
    else:
        reason += f"; {last}"
    outcome = Outcome("stopped", reason, step=step, signal=number or SIGTERM)
    if leaves:
        return outcome
    with contextlib.suppress(PlaitError):  # a full disk
        folder.set_outcome(outcome)
    return outcome


def remove_half_done(config: Config, folder: RunFolder) -> None:
    """What ranks that failed or were killed were writing. All ranks must be gone; other machines' may not be."""
    if config.launch.most == 1:
        with contextlib.suppress(PlaitError, OSError):
            folder.remove_torn()
            open_store(folder.checkpoints(config.checkpoint.dir)).clean()
