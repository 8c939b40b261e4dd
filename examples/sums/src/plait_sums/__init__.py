"""Sums to learn, such as "07+35=42": a source of data whose samples follow from their number alone."""

from typing import ClassVar

import attrs
from attrs.validators import ge, in_, le

from plait import Source
from plait_sums.batches import SumBatches


@attrs.define(kw_only=True, slots=False)
class Sums(Source):
    """Each document is one sum of two numbers of `digits` digits, and each token one byte of it. Nothing is kept on
    disk, and nothing ends.

    attention: "document": a token sees its own sum; "across": also those before it in its sample.
    """

    digits: int = attrs.field(default=2, validator=[ge(1), le(9)])
    attention: str = attrs.field(default="document", validator=in_(("across", "document")))

    indexable: ClassVar[bool] = True
    has_validation: ClassVar[bool] = True  # held-out sums have seeds of their own

    @property
    def vocabulary(self) -> int:
        return 256

    def fingerprint(self) -> str:
        return f"{self.attention} {self.digits}".encode().hex()

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> SumBatches:
        return SumBatches(self.digits, self.attention == "document", seed, (seq_len, global_batch_size, dp))
