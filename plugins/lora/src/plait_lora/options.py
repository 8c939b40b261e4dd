"""The options of lora, which `conf/strategy/lora.yaml` explains."""

import attrs
from attrs.validators import ge, gt


@attrs.define
class LoraOptions:
    rank: int = attrs.field(default=8, validator=ge(1))
    alpha: float = attrs.field(default=16.0, validator=gt(0))
    targets: list[str] = attrs.field(factory=lambda: ["heads", "ffn"])
    merge: bool = False
    random_base: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
