"""Whether a run can continue with a checkpoint's data: with the next sample, whatever its batches."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from plait.checkpoint.at_address import open_store
from plait.checkpoint.choose import choose
from plait.checkpoint.store import Manifest, Store, samples_of
from plait.contract.config import Checkpoint, Config
from plait.contract.errors import PlaitError
from plait.data.parts import unshared
from plait.data.source import blaming_source
from plait.parallel.sequence_loss import rows_together
from plait.records.run_folder import RunFolder

if TYPE_CHECKING:
    from plait.check.checked import Checked

WEIGHTS = "set another run.name to start afresh, or start from its weights with checkpoint.init_from"


def check_data(manifest: Manifest, checked: "Checked") -> None:
    """Raises PlaitError if this run's samples are not the checkpoint's, or if the parts of its stream cannot share a
    batch evenly."""
    train = checked.config.train
    before = manifest.config.get("train") or {}
    for key, now in (("seq_len", train.seq_len), ("seed", train.seed)):
        if (saved := before.get(key, now)) != now:
            raise PlaitError(
                f"train.{key}={now}, but the checkpoint of step {manifest.step} was trained with {saved}, so its "
                f"samples differ and the run cannot continue with the next one: set train.{key}={saved}, {WEIGHTS}"
            ).at(f"train.{key}", now, fits=(saved,))
    if checked.source.indexable:
        return
    states = manifest.data.get("states")
    if not states:
        raise PlaitError(
            f"the checkpoint of step {manifest.step} was not trained on a stream, so it holds no position in "
            f"one: use its data, {WEIGHTS}"
        )
    if train.data_parts not in (None, len(states)):
        raise PlaitError(
            f"train.data_parts={train.data_parts}, but the checkpoint of step {manifest.step} has a stream in "
            f"{len(states)} parts, so its samples differ: leave the key out, {WEIGHTS}"
        ).at("train.data_parts", train.data_parts, fits=(None, len(states)))
    if train.global_batch_size is not None and train.global_batch_size % len(states):
        raise unshared(train.global_batch_size, len(states))


def with_data_of(manifest: Manifest, checked: "Checked", config: Config) -> Config:
    """`config`, with what the source keeps of the checkpoint's node `data`. Raises PlaitError if it cannot go on."""
    resumed, before = getattr(checked.source, "resumed", None), manifest.config.get("data")
    if resumed is None or not before:  # a stranger's may lack it
        return config
    with blaming_source(checked.source, "resumed"):
        kept = resumed(before, samples_of(manifest, manifest.data.get("global_batch_size", 0)))
    return config.with_value("data", {**config.data, **kept}) if kept else config


def with_parts_of(manifest: Manifest, config: Config) -> Config:
    """`config`; of a stream, in as many parts as the checkpoint's."""
    states = manifest.data.get("states")
    return config.with_value("train.data_parts", len(states)) if states else config


def local_batch(config: Config, rows: int) -> int:
    """How many of a rank's `rows` are computed at once: at most `train.local_batch_size`, in equal parts that part no
    group of the loss. Raises PlaitError if there are none."""
    local, group = config.train.local_batch_size, rows_together(config)
    if fits := [n for n in range(group, min(local, rows) + 1, group) if rows % n == 0]:
        return fits[-1]
    raise PlaitError(
        f"the global batch leaves {rows} rows for each data rank, and the loss takes {group} together: use another "
        "number of ranks"
    ).at("train.local_batch_size", local, fits=f"a multiple of {group}")


def batch_to_keep(conf: Checkpoint, folder: Path) -> int | None:
    """The global batch of the checkpoint that the run in `folder` would continue from; None if there is no sound
    one."""
    if not conf.enabled:
        return None
    try:
        path = choose(conf, open_store(RunFolder(folder).checkpoints(conf.dir)), lambda line: None)
        return Store.read(path).data.get("global_batch_size") if path else None
    except PlaitError:
        return None  # `find_checkpoint` says what is wrong


def with_batch_of(manifest: Manifest, config: Config, data_ranks: int, say: Callable[[str], None]) -> Config:
    """`config`; with the checkpoint's global batch, in smaller or more local batches, if its own is null.

    Raises PlaitError if the data ranks cannot share it evenly. Reports what changes.
    """
    train = config.train
    size, local = manifest.data.get("global_batch_size"), train.local_batch_size
    if size is None:
        return config
    if train.global_batch_size is not None:
        if train.global_batch_size != size:
            at = samples_of(manifest, size)
            say(f"data: the global batch was {size} samples and is {train.global_batch_size} from sample {at} on")
        return config
    rows, rest = divmod(size, data_ranks)
    if rest:
        unit = local * data_ranks
        fits = [n * unit for n in (size // unit, size // unit + 1) if n]
        raise PlaitError(
            f"the checkpoint of step {manifest.step} has a global batch of {size} samples, which "
            f"{data_ranks} data ranks cannot share evenly: set train.global_batch_size={' or '.join(map(str, fits))}, "
            "or use another number of data ranks"
        ).at("train.global_batch_size", size, fits=fits)
    smaller = local_batch(config, rows)
    if size != local * data_ranks:
        say(
            f"data: the checkpoint's global batch of {size} samples is kept, in {rows // smaller} local "
            f"batch(es) of {smaller} per rank; train.global_batch_size sets another"
        )
    return config.with_value("train.global_batch_size", size).with_value("train.local_batch_size", smaller)
