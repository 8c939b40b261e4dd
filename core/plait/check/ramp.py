"""Whether a run can take the steps of its `train.ramp`."""

from typing import Any

from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.data.ramp import Ramp


def check_ramp(config: Config, data_ranks: int, indexable: Any) -> None:
    """Raises PlaitError, naming the key, for stages that do not fit the run. indexable: whether its data are."""
    train = config.train
    if not indexable or train.epochs is not None:
        why = "train.epochs does not count its steps" if indexable else "these data are a stream of one batch size"
        raise PlaitError(f"train.ramp is set, but {why}: set train.ramp=null").at("train.ramp", train.ramp, (None,))
    size = train.global_batch_size or train.local_batch_size * data_ranks
    Ramp.of(train, size).check(train.local_batch_size, data_ranks)
