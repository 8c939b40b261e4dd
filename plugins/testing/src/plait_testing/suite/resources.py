"""Does it hold, move and leave behind what it declares, and no more?"""

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait import Applied, Observer, canonical
from plait_testing.count import Collective, Counting, Size
from plait_testing.leaks import left_behind
from plait_testing.pool import Pool
from plait_testing.suite.capabilities import Capabilities
from plait_testing.torch_internals import storage_key
from plait_testing.trial import SAMPLES, SEQ_LEN, Trial, _lies, forward_backward, share, take_step

SIZES = ("llama3", "tied")  # two sizes of one architecture


class Resources(Capabilities):
    def test_no_rank_holds_more_than_declared(self, plait_ranks: Pool, layout: str) -> None:
        """Elements of every parameter, then bytes of all storages of parameters, gradients and optimizer together."""
        chosen, trial = self.layouts[layout], self.trying_tied(dtype="float32", trains_with=None)
        degree, (model, spec) = self.degrees(chosen, trial), self.extended(trial)
        allowed, most = dict[str, int](), 0
        for name, p in model.named_parameters():
            about = {"shape": tuple(p.shape), "axes": spec.axes_of(name), "degree": degree}
            allowed[name] = self.declared("held", chosen, **about)
            gradient, moment = (
                self.declared(what, chosen, held=allowed[name], **about) for what in ("held_gradient", "held_state")
            )
            most += 4 * (allowed[name] + gradient + 2 * moment + 1)  # float32
        for rank, (held, total) in enumerate(plait_ranks.run(_holds, trial, self.selected(chosen), world=chosen.world)):
            for name, (elements, lies) in held.items():
                assert elements <= allowed[name], (
                    f"rank {rank} holds {elements} elements of {name!r}, declared {allowed[name]}; placement: {lies}"
                )
            assert total <= most, f"rank {rank} holds {total:,} bytes of weights, gradients and AdamW, not {most:,}"

    @pytest.mark.parametrize("size", SIZES)
    def test_collectives_are_those_declared(self, plait_ranks: Pool, layout: str, size: str) -> None:
        if f"model {size}" in self.refuses:
            pytest.skip(f"it refuses the model {size}")
        chosen, trial = self.layouts[layout], Trial(size, dtype="float32")
        degree = self.degrees(chosen, trial)
        size_of = Size.of(*self.extended(trial), SAMPLES * SEQ_LEN)
        wanted = self.declared("collectives", chosen, size=size_of, degree=degree)
        if wanted is None:
            pytest.skip("collectives are not declared")
        for rank, counted in enumerate(plait_ranks.run(_counted, trial, self.selected(chosen), world=chosen.world)):
            _compare(counted, [c for c in wanted if degree.get(c.axis, 2) > 1 and c.count], degree, rank)
        if layout == self.last and size == SIZES[0] and "accumulation" not in self.refuses:
            trial = attrs.evolve(trial, micro=2)
            for rank, counted in enumerate(plait_ranks.run(_counted, trial, self.selected(chosen), world=chosen.world)):
                _compare_accumulated(counted, wanted, self.once_a_step, degree, rank)

    def test_collectives_of_an_update_are_those_declared(self, plait_ranks: Pool, layout: str) -> None:
        chosen, trial = self.layouts[layout], self.trying(dtype="float32", trains_with=None)
        degree = self.degrees(chosen, trial)
        size = Size.of(*self.extended(trial), SAMPLES * SEQ_LEN)
        wanted = self.declared("collectives_of_update", chosen, size=size, degree=degree)
        for rank, counted in enumerate(plait_ranks.run(_updated, trial, self.selected(chosen), world=chosen.world)):
            _compare(counted, [c for c in wanted if degree.get(c.axis, 2) > 1 and c.count], degree, rank)

    def test_nothing_is_left_behind(self, plait_ranks: Pool) -> None:
        """In fresh processes, because a patch of torch is made only once: settings, hooks, patches, process groups."""
        chosen = self.layouts[self.last]
        with plait_ranks.fresh(chosen.world) as fresh:
            answers = fresh.run(left_behind, self.trying(), self.selected(chosen), world=chosen.world)
        for rank, answer in enumerate(answers):
            assert not answer, f"after a run on rank {rank}: {'; '.join(answer)}"


def _compare(counted: list[Collective], wanted: list[Collective], degree: Mapping[str, int], rank: int) -> None:
    twice = [c for i, c in enumerate(wanted) if any((c.op, c.axis) == (d.op, d.axis) for d in wanted[:i])]
    assert not twice, f"declared more than once, so add them up: {_listed(twice)}"
    seen = {(c.op, c.axis): c for c in counted if degree.get(c.axis, 2) > 1}
    for declared in wanted:
        got = seen.pop((declared.op, declared.axis), None)
        assert got is not None, f"rank {rank}: declared: {declared}, none was seen; seen: {_listed(counted)}"
        assert got.count == declared.count, f"rank {rank}: {got}; declared: {declared}"
        if declared.elements is not None:
            assert got.elements == declared.elements, f"rank {rank}: {got}; declared: {declared}"
    assert not seen, f"rank {rank}: not declared: {_listed(seen.values())}"


def _compare_accumulated(
    counted: list[Collective], wanted: list[Collective], once: tuple[str, ...], degree: Mapping[str, int], rank: int
) -> None:
    """Fails if a step of two micro-batches has more collectives than twice those declared, or than those of `once`."""
    most = {(c.op, c.axis): c for c in wanted}
    for got in counted:
        declared = most.get((got.op, got.axis))
        if degree.get(got.axis, 2) == 1:
            continue
        assert declared is not None, f"rank {rank}, with two micro-batches: not declared: {got}"
        times = 1 if got.op in once else 2
        why = f"declared for {'the step' if times == 1 else 'each'}: {declared}"
        assert got.count <= times * declared.count, f"rank {rank}, with two micro-batches: {got}; {why}"
        if declared.elements is not None and got.elements is not None:
            assert got.elements <= times * declared.elements, f"rank {rank}, with two micro-batches: {got}; {why}"


def _listed(collectives: Any) -> str:
    return ", ".join(map(str, collectives)) or "none"


def _holds(trial: Trial, strategies: Mapping[str, Any]) -> tuple[dict[str, tuple[int, str]], int]:
    """(FQN -> (elements, placement), bytes of all unique storages) after a step; the second creates the optimizer's."""
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(trial.optimizer)
    take_step(applied, optimizer, trial, 0)
    forward_backward(applied, trial, 1)
    named = [pair for part in applied.parts for pair in part.named_parameters()]
    held = {canonical(name): (_local(p).numel(), _lies(p)) for name, p in named}
    tensors: list[Tensor] = []
    for param in applied.parameters():
        tensors += [_local(t) for t in (param, param.grad) if t is not None]
    for group in optimizer.param_groups:
        tensors += [_local(t) for t in group["params"]]
    for kept in optimizer.state.values():
        tensors += [_local(t) for t in kept.values() if isinstance(t, Tensor)]
    storages = {storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}
    return held, sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _counted(trial: Trial, strategies: Mapping[str, Any]) -> list[Collective]:
    """The collectives of forward and backward of the second batch: the first may set things up."""
    applied = trial.apply(strategies)
    forward_backward(applied, trial, 0)
    mine = applied.deal(share(applied, trial, 1)[0])
    parts = mine.split(-(-len(mine.tokens) // trial.micro))
    with Counting(applied.mesh) as counting:
        applied.forward_backward(parts, 1)
    return counting.found()


def _updated(trial: Trial, strategies: Mapping[str, Any]) -> list[Collective]:
    """The collectives of the optimizer's step, of the second batch."""
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(trial.optimizer)
    take_step(applied, optimizer, trial, 0)
    update = _Update(applied)
    take_step(applied, optimizer, trial, 1, update)
    return update.counting.found()


class _Update(Observer):
    """Counts what the optimizer does in a step."""

    def __init__(self, applied: Applied) -> None:
        self.counting = Counting(applied.mesh)

    def optimizer(self) -> None:
        self.counting.__enter__()

    def balance(self) -> None:
        self.counting.__exit__(None, None, None)
