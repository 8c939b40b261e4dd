"""Sums to learn, such as "07+35=42": a source of data whose samples follow from their number alone."""

import hashlib
from typing import TYPE_CHECKING, ClassVar

import attrs
from attrs.validators import ge, le

from plait.data import Source

if TYPE_CHECKING:
    from plait_sums.batches import SumBatches


@attrs.define(kw_only=True, slots=False)
class Sums(Source):
    """Each document is one sum of two numbers of `digits` digits. Nothing is kept on disk, and nothing ends."""

    digits: int = attrs.field(default=2, validator=[ge(1), le(9)])

    indexable: ClassVar[bool] = True
    has_validation: ClassVar[bool] = True  # held-out sums have seeds of their own

    def fingerprint(self) -> str:
        told = f"{self.digits} {self.encoder.digest} {self.attention}"
        return hashlib.sha256(told.encode()).hexdigest()

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> "SumBatches":
        from plait_sums.batches import SumBatches

        documents = self.attention == "document"
        return SumBatches(self.digits, self.encoder, documents, seed, (seq_len, global_batch_size, dp))
