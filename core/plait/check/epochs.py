"""How many steps a run of `train.epochs` takes, which its data decide."""

from math import ceil
from typing import TYPE_CHECKING

from plait.check.resumed_data import with_batch_of
from plait.checkpoint.store import Manifest, samples_of
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.data.source import blaming_source

if TYPE_CHECKING:
    from plait.check.checked import Checked


def check_epochs(config: Config, indexable: bool) -> None:
    """Raises PlaitError, before the data are made, if `train.epochs` is set for data whose length is not known, or if
    `profile.start` is past the last step."""
    if config.train.epochs is None:
        check_profile(config)
    elif not indexable:
        raise _uncounted(config)


def check_profile(config: Config) -> None:
    """Raises PlaitError if `profile.start` is past the last step."""
    start, steps = config.profile.start, config.train.steps
    if config.profile.enabled and start > steps:
        raise PlaitError(f"profile.start={start} is past the last step, train.steps={steps}").at(
            "profile.start", start, fits=f"at most {steps}"
        )


def with_steps(checked: "Checked", config: Config, manifest: Manifest | None) -> Config:
    """`config`; with the `train.steps` that `train.epochs` passes over the data take, if the run asks for those.

    The last step begins before the last pass ends. manifest: of the checkpoint that the run continues from.
    """
    train = config.train
    if train.epochs is None:
        return config
    ranks = checked.layout.count("batch")
    if manifest:
        train = with_batch_of(manifest, config, ranks, lambda line: None).train
    size = train.global_batch_size or train.local_batch_size * ranks
    with blaming_source(checked.source, "open"):
        batches = checked.source.open(seq_len=train.seq_len, seed=train.seed, global_batch_size=size, dp=(0, 1))
    epoch = getattr(batches, "epoch", None)
    if not epoch:
        raise _uncounted(config)
    steps, samples = (manifest.step, samples_of(manifest, size)) if manifest else (0, 0)
    left = max(round(train.epochs * epoch) - samples, 0)
    config = config.with_value("train.steps", max(steps + ceil(left / size), 1))
    check_profile(config)
    return config


def _uncounted(config: Config) -> PlaitError:
    epochs = config.train.epochs
    return PlaitError(
        f"train.epochs={epochs:g}, but these data do not say how many samples they have: set train.steps, and "
        "train.epochs=null"
    ).at("train.epochs", epochs, fits=(None,))
