"""A mode of fake tensors that remembers what each operator makes of tensors of such sizes, and makes it again.

torch's mode has such a cache, too. What it asks of every tensor, and how it makes a result, takes most of the time of a
trace; here only plain cases are remembered, with a key that is quickly told, and all others are left to torch.
"""

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from plait_plan.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    FakeTensors,
    dispatch_keys,
    is_of_torch,
    schema,
    storage_key,
)

MOST = 100_000  # calls that are remembered
PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)  # their values are equal only if they mean the same, together with their type
OTHERWISE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


@attrs.frozen(slots=True)
class Made:
    """How a tensor among the results is made again. given: the place of the tensor among those given that it is, or a
    view of; None: it has memory of its own. whole: whether it is that tensor itself."""

    given: int | None
    whole: bool
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    start: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None


Results = tuple[type | None, tuple[Made | None, ...]]  # of a tuple or list its type; None stands for no tensor
KNOWN: dict[Any, Results | None] = {}  # None: it is left to torch


def has_traced() -> bool:
    """Whether this process, or the one that it is a fork of, has traced a step, so that torch's caches are filled."""
    return bool(KNOWN)


class RememberingMode(FakeTensorMode):
    """Equal to `FakeTensorMode`, and faster."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cache_enabled = False  # torch's own
        self._tensors = FakeTensors(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[FakeTensor] = []
        told: list[Any] = [func, torch.is_inference_mode_enabled()]
        if not (self._tell(told, tensors, args) and self._tell(told, tensors, kwargs.items())):
            return super().__torch_dispatch__(func, types, args, kwargs)
        key = tuple(told)
        if (known := KNOWN.get(key, KNOWN)) is KNOWN:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if len(KNOWN) >= MOST:
                KNOWN.clear()
            KNOWN[key] = self._how(func, tensors, result)
            return result
        if known is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kind, parts = known
        if kind is None:
            return self._make(parts[0], tensors)
        return kind(self._make(part, tensors) for part in parts)

    def _tell(self, told: list[Any], tensors: list[FakeTensor], given: Iterable[Any]) -> bool:
        """Add to `told` all that results may depend on, and to `tensors` those given; False: it is no plain case."""
        for one in given:
            kind = type(one)
            if kind is FakeTensor:
                if one.constant is not None or one.fake_mode is not self or one.layout is not torch.strided:
                    return False
                if one.is_conj() or one.is_neg():
                    return False
                tensors.append(one)
                told += (one.dtype, one.shape, one.stride(), one.storage_offset(), one.requires_grad, one.fake_device)
            elif kind in PLAIN:
                told += (kind, one)
            elif kind is list or kind is tuple or kind is torch.Size:
                told += (kind, len(one))
                if not self._tell(told, tensors, one):
                    return False
            else:
                return False
        return True

    def _how(self, func: Any, tensors: list[FakeTensor], result: Any) -> Results | None:
        if not is_of_torch(func) or OTHERWISE.intersection(func.tags) or "lift" in schema(func).name:
            return None
        kind = type(result) if isinstance(result, tuple | list) else None
        if kind not in (None, tuple, list):
            return None
        parts: list[Made | None] = []
        own: set[int] = set()
        for one in result if kind else (result,):
            if one is None:
                parts.append(None)
                continue
            made = self._of(one, tensors)
            if made is None or dispatch_keys(self._make(made, tensors)) != dispatch_keys(one):
                return None
            if made.given is None and (memory := storage_key(one.untyped_storage())) in own:
                return None
            if made.given is None:
                own.add(memory)
            parts.append(made)
        return kind, tuple(parts)

    def _of(self, one: Any, tensors: list[FakeTensor]) -> Made | None:
        for at, given in enumerate(tensors):
            if given is one:
                return Made(at, True)
        if type(one) is not FakeTensor or one.constant is not None or one.layout is not torch.strided:
            return None
        if one.is_conj() or one.is_neg() or one.requires_grad:
            return None
        memory = one.untyped_storage()
        memories = [storage_key(given.untyped_storage()) for given in tensors]
        place = memories.index(storage_key(memory)) if storage_key(memory) in memories else None
        if place is None and (one.storage_offset() or memory.nbytes() != _bytes(one)):
            return None
        shape, start = one.shape, int(one.storage_offset())
        return Made(place, False, shape, one.stride(), start, one.dtype, one.fake_device)

    def _make(self, made: Made | None, tensors: list[FakeTensor]) -> Tensor | None:
        if made is None:
            return None
        if made.whole:
            return tensors[made.given]  # type: ignore[index]
        if made.given is None:
            plain = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        else:
            plain = torch.empty(0, dtype=made.dtype, device="meta")
            plain.set_(tensors[made.given].untyped_storage(), made.start, made.shape, made.stride)
        return self._tensors.of(plain, made.device)


def _bytes(one: Tensor) -> int:
    """Of the memory that torch gives to a tensor of such a size."""
    if one.numel() == 0:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True))) * one.element_size()
