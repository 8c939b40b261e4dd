"""`train.ramp`: how many samples a step takes, and how long its rows are, by the samples taken before it."""

from typing import Any

import attrs

from plait.contract.batch import Batch
from plait.contract.config import Train
from plait.contract.errors import PlaitError


@attrs.frozen
class Shape:
    """Of one step. samples: over all ranks. seq_len: tokens of a row; a sample that is longer is cut into rows."""

    samples: int
    seq_len: int


@attrs.frozen
class Ramp:
    """stages: (until how many samples are taken, the shape of steps until then), in order. last: the shape from then
    on."""

    stages: tuple[tuple[int, Shape], ...]
    last: Shape

    @classmethod
    def of(cls, train: Train, global_batch_size: int) -> "Ramp":
        """That of a run with this global batch; without `train.ramp` all steps have one shape."""
        last = Shape(global_batch_size, train.seq_len)
        stages = [
            (each["until"], Shape(each.get("global_batch_size", last.samples), each.get("seq_len", last.seq_len)))
            for each in train.ramp or ()
        ]
        return cls(tuple(stages), last)

    def at(self, samples: int) -> Shape:
        """Of the step before which the run has taken `samples`."""
        return next((shape for until, shape in self.stages if samples < until), self.last)

    def after(self, samples: int, steps: int) -> int:
        """How many samples are taken when `steps` more steps follow `samples`."""
        for until, shape in self.stages:
            taken = min(max(-(-(until - samples) // shape.samples), 0), steps)
            samples, steps = samples + taken * shape.samples, steps - taken
        return samples + steps * self.last.samples

    def told(self, facts: Any, taken: tuple[int, int], spec: Any) -> tuple[Any, dict[str, float]]:
        """(`facts` of a run, an attrs object, as those of a step that has `taken` (samples, tokens of a row), the
        columns of its row)."""
        samples, length = taken
        flops = spec.flops(length) if spec.flops else None
        columns: dict[str, float] = {"global_batch_size": samples, "seq_len": length}
        return attrs.evolve(facts, tokens=samples * self.last.seq_len, flops=flops), columns

    def check(self, local_batch_size: int, data_ranks: int) -> None:
        """Raises PlaitError, naming the key, for a stage that the ranks cannot take, or that is larger than what
        follows the ramp."""
        unit = local_batch_size * data_ranks
        for number, (_, shape) in enumerate(self.stages):
            if shape.samples % unit or shape.samples > self.last.samples:
                fits = list(range(unit, self.last.samples + 1, unit))[:4]
                raise PlaitError(
                    f"train.ramp: global_batch_size={shape.samples} of stage {number + 1} must be a multiple of "
                    f"{unit} (train.local_batch_size={local_batch_size} on {data_ranks} data ranks), and at most the "
                    f"{self.last.samples} that follow the ramp"
                ).at(f"train.ramp[{number}].global_batch_size", shape.samples, fits=fits)
            if self.last.seq_len % shape.seq_len:
                raise PlaitError(
                    f"train.ramp: seq_len={shape.seq_len} of stage {number + 1} does not divide "
                    f"train.seq_len={self.last.seq_len}: samples are cut into rows of one length"
                ).at(f"train.ramp[{number}].seq_len", shape.seq_len, fits=f"a divisor of {self.last.seq_len}")


def cut(batch: Batch, seq_len: int) -> Batch:
    """The batch in rows of `seq_len` tokens, those of a sample in order; it has the same tokens and labels."""
    pieces = batch.tokens.shape[1] // seq_len
    if pieces == 1:
        return batch
    rows: dict[str, Any] = {
        name: None if (x := getattr(batch, name)) is None else x.reshape(-1, seq_len) for name in ROWS
    }
    sources = None if batch.sources is None else batch.sources.repeat_interleave(pieces)
    return attrs.evolve(batch, **rows, sources=sources)


ROWS = ("tokens", "labels", "positions")
