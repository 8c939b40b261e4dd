"""Whether a run can take the steps of its `train.ramp`."""

from typing import Any

from plait.contract.config import Config
from plait.contract.errors import PlaitError, misfit
from plait.data.ramp import Ramp

KEYS = ("global_batch_size", "seq_len")  # what a stage may set


def check_ramp(config: Config, data_ranks: int, indexable: Any) -> None:
    """Raises PlaitError, naming the key, for stages that do not fit the run. indexable: whether its data are."""
    train = config.train
    stages = train.ramp or []
    ends = [0, *(stage.get("until", 0) for stage in stages)]
    known = all(stage.keys() - {"until"} and stage.keys() <= {"until", *KEYS} for stage in stages)
    if not known or any(value < 1 for stage in stages for value in stage.values()) or sorted(set(ends)) != ends:
        fits = "stages such as {until: 1000, global_batch_size: 8, seq_len: 512}, each until more samples than the last"
        raise misfit("train.ramp", stages, fits)
    if not indexable or train.epochs is not None:
        why = "train.epochs does not count its steps" if indexable else "these data are a stream of one batch size"
        raise PlaitError(f"train.ramp is set, but {why}: set train.ramp=null").at("train.ramp", train.ramp, (None,))
    size = train.global_batch_size or train.local_batch_size * data_ranks
    Ramp.of(train, size).check(train.local_batch_size, data_ranks)
