"""Where in the data a checkpoint was, and whether a run can go on there: at the same sample, whatever its batches."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from plait.checkpoint.store import Manifest, samples_of
from plait.contract.errors import PlaitError

if TYPE_CHECKING:
    from plait.launch.check import Checked

WEIGHTS = "or start a new run from its weights with checkpoint.init_from"


def check_data(manifest: Manifest, checked: "Checked") -> None:
    """Raises PlaitError if this run's samples are not the checkpoint's, or it divides a stream in another way."""
    train, shares = checked.config.train, checked.layout.count("batch")
    before = manifest.config.get("train") or {}
    for key, now in (("seq_len", train.seq_len), ("seed", train.seed)):
        if (saved := before.get(key, now)) != now:
            raise PlaitError(
                f"train.{key}={now}, but the checkpoint of step {manifest.step} was trained with {saved}, so its "
                f"samples are others and the run cannot go on at the next one: set train.{key}={saved}, {WEIGHTS}"
            )
    if checked.source.indexable:
        return
    states = manifest.data.get("states")
    if not states:
        raise PlaitError(
            f"the checkpoint of step {manifest.step} was trained on other data than a stream, and holds no place in "
            f"one: take its data, {WEIGHTS}"
        )
    if len(states) != shares:
        raise PlaitError(
            f"the checkpoint of step {manifest.step} holds a stream that was read in {len(states)} shares, and this "
            f"run has {shares}: a stream resumes only at the same data-parallel degree"
        )


def keep_batch(manifest: Manifest, checked: "Checked", say: Callable[[str], None]) -> None:
    """If `train.global_batch_size` is null, keep the checkpoint's: in `checked`, by smaller or more local batches.

    Raises PlaitError if the data ranks cannot share it evenly. Says what changes.
    """
    train, shares = checked.config.train, checked.layout.count("batch")
    size, local = manifest.data.get("global_batch_size"), train.local_batch_size
    if size is None:
        return
    if train.global_batch_size is not None:
        if train.global_batch_size != size:
            at = samples_of(manifest, size)
            say(f"data: the global batch was {size} samples and is {train.global_batch_size} from sample {at} on")
        return
    rows, rest = divmod(size, shares)
    if rest:
        unit = local * shares
        fits = [str(n * unit) for n in (size // unit, size // unit + 1) if n]
        raise PlaitError(
            f"the checkpoint of step {manifest.step} has a global batch of {size} samples, which "
            f"{shares} data ranks cannot share evenly: set train.global_batch_size={' or '.join(fits)}, or take "
            f"another number of data ranks"
        )
    train.global_batch_size = size
    train.local_batch_size = max(n for n in range(1, min(local, rows) + 1) if rows % n == 0)
    batch = {"global_batch_size": size, "local_batch_size": train.local_batch_size}
    checked.node["train"] = {**checked.node["train"], **batch}
    if size != local * shares:
        say(
            f"data: the checkpoint's global batch of {size} samples is kept, in {rows // train.local_batch_size} local "
            f"batch(es) of {train.local_batch_size} per rank; train.global_batch_size sets another"
        )
