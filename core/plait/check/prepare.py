"""What one process does for all before training: lock the run's folder, find what to resume, write the ranks'
config."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from plait.check.check import check
from plait.check.checked import Checked
from plait.check.introduced import introduced
from plait.check.resume import find_checkpoint
from plait.check.tested_torch import newer_torch
from plait.checkpoint.folder_owner import claim
from plait.contract.config import Config, Precision
from plait.contract.errors import PlaitError
from plait.data.source import blaming_source, shortened
from plait.data.tokenizer_files import said_of_export
from plait.parallel.assembly import Assembly
from plait.parallel.process_group import device_of
from plait.records.run_folder import Outcome, RunFolder, versions_of
from plait.system.disk import reading, replace
from plait.system.errors import one_line, shown
from plait.system.scratch import CHECKED
from plait.system.writable import can_be_written, could_be_written

Say = Callable[[str], None]


def prepare(checked: Checked, folder: RunFolder, say: Say, make: Callable[[], None] | None = None) -> Outcome | None:
    """Lock the folder and prepare it for the ranks; an outcome means that there is nothing left to train.

    make: makes the data, which may take hours, once the folder is this run's. What is refused leaves no new folder.
    Raises PlaitError if a live run holds the folder, or what it would resume does not fit.
    """
    new = [path for path in (folder.path, folder.path.parent) if not path.exists()]
    ended = None
    with contextlib.ExitStack() as undo:
        if new:
            undo.callback(_discard, folder, *new[1:])
        ended = _prepared(checked, folder, say, make)
        if ended is None:
            undo.pop_all()
    if ended is None:
        _introduce(checked, folder, say)
    return ended


def _discard(folder: RunFolder, *parents: Path) -> None:
    """Remove a new folder, and those that were created for it."""
    folder.discard()
    for path in parents:
        with contextlib.suppress(OSError):  # another run has come
            path.rmdir()


def _prepared(checked: Checked, folder: RunFolder, say: Say, make: Callable[[], None] | None) -> Outcome | None:
    if folder.path.exists():
        folder.lock()
        folder.check()
    checkpoints = folder.checkpoints(checked.config.checkpoint.dir) if checked.config.checkpoint.enabled else None
    where = f"checkpoint.dir={shown(checked.config.checkpoint.dir)}:"

    def make_data_here() -> None:
        if make is None:
            return
        folder.lock()  # before hours of work: the disk may refuse it, and another start of the run may come
        if checkpoints:
            could_be_written(checkpoints, where)
        make()

    counted = checked.config.train.epochs is not None  # the last step is known when the data are
    if counted:
        make_data_here()
    with reading(checked.config.checkpoint.dir, "checkpoint.dir"):
        start = find_checkpoint(checked, folder, say)
    if start.finished:
        key = "train.steps" if start.config.train.epochs is None else "train.epochs"
        reason = f"{folder.path.name} is finished at step {start.step}: raise {key}, or set another run.name"
        return Outcome("finished", reason, step=start.step)
    checked.assembly.run.config = start.config
    if not counted:
        make_data_here()
    folder.lock()
    folder.clear_outcome()
    folder.write_config(checked.config.plain())
    for name, text in checked.files.items():
        replace(folder.path / name, text)
    folder.write_versions(versions_of(checked.distributions))
    folder.write_mesh(checked.layout.as_json())
    if checkpoints:
        can_be_written(checkpoints, where)
        claim(checkpoints, folder.path)
    return None


def _introduce(checked: Checked, folder: RunFolder, say: Say) -> None:
    """Say what trains, and what of it is probably not meant."""
    import torch

    for fact in introduced(checked):
        say(fact)
    if advice := all_warmup(checked.config):
        say(advice)
    if advice := newer_torch(str(torch.__version__)):
        say(advice)
    if advice := rate_of_a_toy(checked.config):
        say(advice)
    if advice := lost_steps(checked.config.precision, checked.config.optimizer.get("lr")):
        say(advice)
    if advice := slow_float32(checked.config.precision, device_of(checked.config.launch.device)):
        say(advice)
    if checked.config.checkpoint.enabled and checked.config.checkpoint.export:
        tokens = getattr(checked.source, "vocabulary", None)
        if line := said_of_export(checked.config.data, checked.assembly.model, tokens):
            say(line)
    for line, _ in checked.said:
        say(line)
    say(f"run: {folder.path}")


def all_warmup(config: Config) -> str | None:
    """What to say if the run ends before the rate that it asks for is reached."""
    steps, warmup = config.train.steps, config.schedule.warmup(config.train.steps)
    if config.schedule.shape or warmup <= steps:
        return None
    return (
        f"schedule: all {steps} steps are warm-up (schedule.warmup_steps={warmup}): the rate never reaches optimizer.lr"
    )


# The highest published rate of full fine-tuning that we know: of SmolLM2's 135M and 360M (alignment-handbook's
# recipes/smollm2/sft/config_smol.yaml). Tülu 3's 8B took 5e-6.
HIGHEST_RATE = 1e-3


def rate_of_a_toy(config: Config) -> str | None:
    """What to say if Adam's steps are so large that they undo the weights that the run starts from."""
    lr, start = config.optimizer.get("lr"), config.checkpoint.init_from
    if start is None or lr is None or lr <= HIGHEST_RATE or "Adam" not in config.optimizer.get("_target_", ""):
        return None
    return (
        f"optimizer: lr={lr:g} is for a small model that learns from nothing, and undoes what the weights of this "
        "run's start know; published fine-tuning takes 5e-6 to 2e-5, and 1e-4 to 2e-4 with adapters "
        "(+recipe=sft has the values of a published run)"
    )


def slow_float32(precision: Precision, device_type: str) -> str | None:
    """What to say if this run would use a fraction of a GPU's speed."""
    import torch

    if device_type != "cuda" or precision.param != "float32" or torch.get_float32_matmul_precision() != "highest":
        return None
    return (
        "precision: float32 without TF32 uses a fraction of this GPU's speed; precision.param=bfloat16 computes in "
        "bfloat16 and keeps float32 weights (+hardware=h100 compiles, too)"
    )


def lost_steps(precision: Precision, lr: float | None) -> str | None:
    """What to say if steps of the size `lr`, as Adam's are, would be rounded away near 1 in the dtype of the weights.

    Just below 1 the numbers of a dtype are `eps / 2` apart, so less than half of that changes nothing.
    """
    import torch

    least = torch.finfo(getattr(torch, precision.storage)).eps / 4
    if lr is None or precision.storage != "bfloat16" or precision.rounding == "stochastic" or lr >= least:
        return None
    return (
        f"precision: small steps are rounded away in {precision.storage}: optimizer.lr={lr:g} cannot change a weight "
        f"near 1, such as a norm's, which needs steps of {least:.1g}; precision.storage=float32 with "
        "precision.param=bfloat16 computes in bfloat16 and loses none, and by precision.rounding=stochastic they add up"
    )


def make_data(checked: Checked, say: Say) -> None:
    """Prepare the data on this machine. Raises PlaitError if they are too few for one sample, and if their labels are
    not for this model."""
    _check_labels(checked)
    with blaming_source(checked.source, "prepare"):
        checked.source.prepare(say)
    with blaming_source(checked.source, "check_length"):
        checked.source.check_length(seq_len=checked.config.train.seq_len)
    if line := shortened(checked.source, checked.config.train.seq_len):
        say(f"data: {line}")


def _check_labels(checked: Checked) -> None:
    """Raise PlaitError if the model sees what it is to predict, or is asked for what it cannot see."""
    causal, hides = checked.assembly.run.spec.causal, getattr(checked.source, "hides", False)
    if causal != hides:
        return
    what, why, fits = (
        ("earlier tokens only", "asks for hidden ones by what stands on both sides", "data=text, or another source")
        if causal
        else ("later tokens too", "asks for the next one, which is in sight", "data=masked, or data that hide tokens")
    )
    name = type(checked.source).__name__
    raise PlaitError(f"a token of this model sees {what}, but data of {name} {why}: take {fits}").at(
        "data", name, fits=fits
    )


def prepare_together(
    config: Config, folder: RunFolder, say: Say, files: Mapping[str, str] | None = None
) -> tuple[RunFolder, Outcome | None, Assembly | None]:
    """The same in ranks that a launcher started: rank 0 checks and prepares for all, once all machines are known to be
    alike. files: those that strategies left in the launcher's check.

    Starts the process group. Returns the folder on all ranks, and on rank 0 the assembly of its check, which it trains
    with. If the same machines start their ranks again, nothing is checked again. Raises on all ranks the PlaitError of
    rank 0, or that of machines that differ or do not share the folder.
    """
    import torch.distributed as dist

    from plait.check.alike import check_alike
    from plait.check.shared import check_shared, mark
    from plait.parallel.agreement import on_rank_0
    from plait.parallel.process_group import end_group, start_group

    launch, by_epochs = config.launch, config.train.epochs is not None
    seconds = launch.timeout_seconds + 60  # after the watchdog has written its stacks
    start_group(device_of(launch.device), seconds, launch.rendezvous_seconds)

    assembly, new = None, not folder.path.exists()
    is_rank_0, scratch = dist.get_rank() == 0, os.environ.get("PLAIT_SCRATCH")

    def again() -> str | None:
        """The folder, if the same machines have prepared it for an earlier start of their ranks."""
        if scratch is None or not (Path(scratch) / CHECKED).exists():
            return None
        folder.lock()
        folder.clear_outcome()
        return str(folder.path)

    try:
        before = on_rank_0(again)
    except PlaitError:
        end_group()
        raise
    if before is not None:
        return folder if is_rank_0 else RunFolder(Path(before)), None, None

    def prepared() -> tuple[str, Outcome | None, dict[str, str]]:
        nonlocal assembly
        try:
            checked = check(config, dist.get_world_size(), folder.path, files)
            assembly = checked.assembly
            alone = "PLAIT_LAUNCHER" not in os.environ  # else it has prepared them
            ended = prepare(checked, folder, say, (lambda: make_data(checked, say)) if alone and by_epochs else None)
            conf = checked.config.checkpoint
            places = [folder.path, *([folder.checkpoints(conf.dir)] if conf.enabled else [])]
            places = [each for each in places if isinstance(each, Path)]  # all machines see the same at an address
            return str(folder.path), ended, mark(places) if ended is None else {}
        except OSError as error:
            raise PlaitError(f"the run cannot be prepared: {one_line(error)}") from error

    try:
        check_alike(config)
        path, ended, marks = on_rank_0(prepared)
        try:
            check_shared(marks)
        except PlaitError:
            if is_rank_0 and new:
                folder.discard()
            raise
    except PlaitError:
        end_group()
        raise
    if ended is not None:
        end_group()
    elif is_rank_0 and scratch is not None:
        with contextlib.suppress(OSError):  # a full disk
            (Path(scratch) / CHECKED).touch()
    return folder if is_rank_0 else RunFolder(Path(path)), ended, assembly
