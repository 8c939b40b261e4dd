"""The options of pipeline, which `conf/strategy/pipeline.yaml` explains, and the schedules that one of them names."""

import attrs
from attrs.validators import ge, in_, optional


@attrs.frozen
class TorchSchedule:
    """name: of torch's class. several: whether ranks have several stages. fewest: micro-batches that it needs, in units
    of `degree`; fewer run as in GPipe. split: whether gradients of weights come later than those of the stream. v:
    whether a rank has two stages, one on the way down the ranks and one back up. stages: of a rank, by default."""

    name: str
    several: bool = False
    fewest: int = 0
    split: bool = False
    v: bool = False

    @property
    def stages(self) -> int:
        return 2 if self.several else 1


SCHEDULES = {
    "gpipe": TorchSchedule("ScheduleGPipe"),
    "1f1b": TorchSchedule("Schedule1F1B", fewest=1),
    "interleaved_1f1b": TorchSchedule("ScheduleInterleaved1F1B", several=True, fewest=1),
    "zero_bubble": TorchSchedule("ScheduleInterleavedZeroBubble", several=True, fewest=1, split=True),
    "zbv": TorchSchedule("ScheduleZBVZeroBubble", several=True, split=True, v=True),
}


@attrs.define(slots=False)
class PipelineOptions:
    degree: int = attrs.field(default=2, validator=ge(1))
    schedule: str = attrs.field(default="1f1b", validator=in_(tuple(SCHEDULES)))
    stages_per_rank: int | None = attrs.field(default=None, validator=optional(ge(1)))
    layers_per_stage: list[int] | None = None

    @property
    def per_rank(self) -> int:
        """The stages of each rank."""
        return self.stages_per_rank or SCHEDULES[self.schedule].stages
