"""Do initial values cover the model, and are they a function of the seed alone?"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait_testing.model_suite.subject import Subject, filled


class Filled(Subject):
    def filled(self, seed: int = 0) -> dict[str, Tensor]:
        """Name -> parameter or buffer, as a run fills them from `seed`. Memory that nobody writes is not a number, or
        the largest integer."""
        model, spec = self.described()
        with _marked_memory():
            filled(model, spec, seed)
        return dict(model.named_parameters()) | dict(model.named_buffers())

    def test_initial_values_cover_everything(self) -> None:
        left = [name for name, tensor in self.filled().items() if _unwritten(tensor)]
        assert not left, f"`init` leaves out {', '.join(left)}, or a part of it"

    def test_initial_values_follow_from_the_seed(self) -> None:
        torch.manual_seed(1)
        one = self.filled()
        torch.manual_seed(2)
        again, other = self.filled(), self.filled(seed=1)
        apart = [name for name in one if not torch.equal(one[name], again[name])]
        assert not apart, f"with the same seed {', '.join(apart)} differ: `init` draws from the generator that it gets"
        assert any(not torch.equal(one[name], other[name]) for name in one), "another seed gives the same values"

    def test_ties_hold_after_allocation(self) -> None:
        model, spec = self.described()
        before = _shared(model)
        filled(model, spec)
        assert _shared(model) == before, (
            f"names of one parameter were {before}, and are {_shared(model)} once allocated"
        )


def _shared(model: Any) -> set[frozenset[str]]:
    """The groups of names that share a parameter."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def _unwritten(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Inside, new memory holds what `_unwritten` knows."""
    fills: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    fills.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        fills.fill_uninitialized_memory = before[1]
