"""Does it compute what one process computes? Gradients are compared per parameter: losses prove nothing."""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from plait import Batch
from plait_testing.parity import BOUNDS, apart, unequal, wrong_gradients
from plait_testing.pool import Pool
from plait_testing.suite.capabilities import SINGLE_STEPS
from plait_testing.suite.nearness import Descent, Nearness
from plait_testing.torch_internals import TorchDispatchMode
from plait_testing.trial import SAMPLES, SEQ_LEN, Trial, TrialResult, forward_backward, full, held

STEPS = 20
FEW = 3  # steps after which gradients are compared again: some begin with zero. Later rounding has grown


class Numerics(Nearness):
    def test_initial_parameters_are_bitwise_those_of_one_process(self, plait_ranks: Pool, layout: str) -> None:
        trial = self.trying(steps=STEPS)
        for rank, result in enumerate(self.results(plait_ranks, layout, trial)):
            wrong = unequal(result.initial, self.initial(plait_ranks, trial))
            assert wrong is None, f"initial parameters on rank {rank}: {wrong}"

    def test_every_token_is_seen_once(self, plait_ranks: Pool, layout: str) -> None:
        """Of the ranks that count for their tokens, no two have the same, none is left out, and each token has its own
        label and position."""
        chosen = self.layouts[layout]
        dealt = plait_ranks.run(_dealt, self.trying(), self.selected(chosen), world=chosen.world)
        for rank, (_, _, wrong) in enumerate(dealt):
            assert not wrong, f"rank {rank}: {wrong} tokens have another token's label or position"
        tokens = sorted(token for seen, leader, _ in dealt if leader for token in seen)
        assert tokens == list(range(SAMPLES * SEQ_LEN)), f"{len(tokens)} tokens are seen, {len(set(tokens))} different"

    def test_gradients_equal_one_process(self, plait_ranks: Pool, layout: str) -> None:
        self._gradients(plait_ranks, layout, self.trying(steps=STEPS))

    def test_losses_of_20_steps_equal_one_process(self, plait_ranks: Pool, layout: str) -> None:
        self._losses(plait_ranks, layout, self.trying(steps=STEPS))

    def test_buffers_after_20_steps_equal_one_process(self, plait_ranks: Pool, layout: str) -> None:
        """State of a model besides its parameters: the balance of experts."""
        self._buffers(plait_ranks, layout, self.trying(steps=STEPS))

    def test_gradient_norms_equal_one_process(self, plait_ranks: Pool, layout: str) -> None:
        trial = self.trying(steps=STEPS)
        expected = self.expected(plait_ranks, layout, trial)
        for rank, result in enumerate(self.results(plait_ranks, layout, trial)):
            error, step = apart(result.norms, expected[rank].norms)
            assert error <= 1e-9, f"rank {rank}: the norm of the gradients of step {step} is off by {error:.2e}"

    def test_plain_steps_go_the_way_of_one_process(self, plait_ranks: Pool) -> None:
        """Without AdamW and clipping, which hide the scale of what a strategy does to gradients."""
        trial = Descent(self.trying().model)
        expected = self.of_one_process(plait_ranks, self.last, trial)
        self.check_way(self.results(plait_ranks, self.last, trial), expected, trial)

    def test_clipping_scales_every_gradient_alike(self, plait_ranks: Pool) -> None:
        chosen = self.layouts[self.last]
        for rank, (norm, worst, name) in enumerate(
            plait_ranks.run(_clipped, self.trying(), self.selected(chosen), world=chosen.world)
        ):
            assert worst <= 1e-5, f"rank {rank}: {name!r} was not scaled by max_norm / norm (norm {norm:.6g})"

    def test_models_equal_one_process(self, plait_ranks: Pool, model: str) -> None:
        """A few steps of every model: initial parameters bitwise, gradients, losses."""
        # The first model's trial is that of other tests.
        trial = self.trying(steps=STEPS) if model == self.trying().model else self.trial(model, last=True)
        for rank, result in enumerate(self.results(plait_ranks, self.last, trial)):
            wrong = unequal(result.initial, self.initial(plait_ranks, trial))
            assert wrong is None, f"initial parameters on rank {rank}: {wrong}"
        self._gradients(plait_ranks, self.last, trial)
        self._losses(plait_ranks, self.last, trial)

    def test_tied_parameters_stay_tied(self, plait_ranks: Pool) -> None:
        tied = [model for model in ("tied", "odd") if f"model {model}" not in self.refuses]
        if not tied:
            pytest.skip("it refuses all models with tied parameters")
        chosen = self.layouts[self.last]
        for model in tied:
            names = {name for name, _ in self.extended(Trial(model))[0].named_parameters()}
            for got in plait_ranks.run(_names, Trial(model), self.selected(chosen), world=chosen.world):
                assert got == names, f"parameters of {model!r} that should be one are several: {sorted(got - names)}"

    def test_accumulation_equals_one_big_batch(self, plait_ranks: Pool) -> None:
        self._same_as_one_process(plait_ranks, self.trying(micro=2))

    def test_packed_documents_equal_one_process(self, plait_ranks: Pool) -> None:
        """Of four blocks, in two micro-batches."""
        micro = 1 if "accumulation" in self.refuses else 2
        self._same_as_one_process(plait_ranks, self.trying_four(documents=True, micro=micro))

    def test_the_loss_by_chunks_equals_one_process(self, plait_ranks: Pool) -> None:
        self._same_as_one_process(plait_ranks, self.trying(chunks=3))

    def test_the_compiled_loss_by_chunks_equals_one_process(self, plait_ranks: Pool) -> None:
        self._same_as_one_process(plait_ranks, self.trying(chunks=3, compile="aot_eager"))

    def test_recomputation_changes_nothing(self, plait_ranks: Pool, mode: str) -> None:
        self._same_as_one_process(plait_ranks, self.trying(remat=mode))

    def test_compiled_equals_one_process(self, plait_ranks: Pool) -> None:
        self._same_as_one_process(plait_ranks, self.trying(compile="aot_eager"))

    def test_compiled_and_recomputed_equals_one_process(self, plait_ranks: Pool) -> None:
        self._same_as_one_process(plait_ranks, self.trying(compile="aot_eager", remat="full"))

    def test_float32_equals_one_process(self, plait_ranks: Pool) -> None:
        self._same_as_one_process(plait_ranks, self.trying(dtype="float32", steps=SINGLE_STEPS))

    def test_mixed_precision_stays_near_float32(self, plait_ranks: Pool) -> None:
        mixed, single = self.trying(dtype="mixed"), self.trying(dtype="float32")
        expected = self.expected(plait_ranks, self.last, single)
        for rank, result in enumerate(self.results(plait_ranks, self.last, mixed)):
            self._check_gradients(result, expected[rank], mixed, rank)
            self._check_losses(result, expected[rank], mixed, rank)

    def test_mixed_precision_computes_in_bfloat16(self, plait_ranks: Pool) -> None:
        chosen, trial = self.layouts[self.last], self.trying(dtype="mixed")
        answers = self.try_or_be_refused(plait_ranks, trial, _dtypes, trial, self.selected(chosen), world=chosen.world)
        for computed, stored in answers:
            assert computed == {"torch.bfloat16"}, f"matrix products run in {sorted(computed)}"
            assert stored == {"torch.float32"}, f"parameters and gradients are stored in {sorted(stored)}"

    def _same_as_one_process(self, ranks: Pool, trial: Trial) -> None:
        self._gradients(ranks, self.last, trial)
        self._losses(ranks, self.last, trial)
        if trial.dtype == "float64":
            self._buffers(ranks, self.last, trial)

    def _gradients(self, ranks: Pool, layout: str, trial: Trial) -> None:
        results, expected = self.results(ranks, layout, trial), self.expected(ranks, layout, trial)
        one = self.of_one_process(ranks, layout, trial)
        assert any(one.norms), f"all gradients of {trial.model} are zero in one process, so this check says nothing"
        if self.own:
            self.check_near(results, one, trial)
        for rank, result in enumerate(results):
            self._check_gradients(result, expected[rank], trial, rank)
        self.note_untrained(ranks, layout, trial, one)

    def _losses(self, ranks: Pool, layout: str, trial: Trial) -> None:
        expected = self.expected(ranks, layout, trial)
        for rank, result in enumerate(self.results(ranks, layout, trial)):
            self._check_losses(result, expected[rank], trial, rank)

    def _buffers(self, ranks: Pool, layout: str, trial: Trial) -> None:
        """Those in a checkpoint: others may be a rank's own."""
        saved = set(self.extended(trial)[0].state_dict())
        expected = self.expected(ranks, layout, trial)
        for rank, result in enumerate(self.results(ranks, layout, trial)):
            found, one = ({k: b for k, b in t.buffers.items() if k in saved} for t in (result, expected[rank]))
            assert (wrong := unequal(found, one)) is None, f"buffers on rank {rank}: {wrong}"

    def _check_gradients(self, result: TrialResult, expected: TrialResult, trial: Trial, rank: int) -> None:
        assert result.gradients.keys() == expected.gradients.keys(), "not the gradients of every parameter"
        spec = self.extended(trial)[1]
        wrong = wrong_gradients(result, expected, BOUNDS[trial.dtype][0], spec)
        assert wrong is None, f"rank {rank}: {wrong}"
        if expected.last and trial.steps <= FEW and trial.dtype == "float64":
            held, one = (attrs.evolve(each, gradients=each.last) for each in (result, expected))
            wrong = wrong_gradients(held, one, BOUNDS[trial.dtype][1], spec)
            assert wrong is None, f"rank {rank}, step {trial.steps}: {wrong}"

    def _check_losses(self, result: TrialResult, expected: TrialResult, trial: Trial, rank: int) -> None:
        error, step = apart(result.losses, expected.losses)
        bound = BOUNDS[trial.dtype][1]
        assert error <= bound, f"rank {rank}: the loss of step {step} is off by {error:.2e} (bound {bound:.0e})"


def _dealt(trial: Trial, strategies: Mapping[str, Any]) -> tuple[list[int], bool, int]:
    """(the tokens that this rank sees, whether it counts for them, how many have a wrong label or position)."""
    applied = trial.apply(strategies)
    index, count = applied.mesh.rank_and_size("batch")
    tokens = torch.arange(SAMPLES * SEQ_LEN).view(SAMPLES, SEQ_LEN).chunk(count)[index]
    dealt = applied.deal(Batch(tokens, tokens + 1))
    own, labels, positions = dealt.tokens, dealt.labels, dealt.positions
    places = own % SEQ_LEN
    if positions is None:
        positions = torch.arange(own.shape[1]).expand_as(own)
    wrong = (labels != own + 1) | (positions != places)
    return own.flatten().tolist(), applied.mesh.is_dp_leader(), int(wrong.sum())


def _clipped(trial: Trial, strategies: Mapping[str, Any]) -> tuple[float, float, str]:
    """(norm, largest relative error, FQN) of gradients clipped to half their norm; torch adds 1e-6 to that norm."""
    applied = trial.apply(strategies)
    forward_backward(applied, trial, 0)
    norm = float(applied.clip_grads(math.inf))
    named = [pair for part in applied.parts for pair in part.named_parameters()]
    before = {name: full(p.grad) for name, p in named if p.grad is not None}
    applied.clip_grads(norm / 2)
    scale = norm / 2 / (norm + 1e-6)
    errors = {
        name: float((full(p.grad) - before[name] * scale).norm() / before[name].norm().clamp(min=1e-30))
        for name, p in named
        if p.grad is not None
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return norm, math.inf if math.isnan(errors[worst]) else errors[worst], worst


def _names(trial: Trial, strategies: Mapping[str, Any]) -> set[str]:
    return set(held(trial.apply(strategies), lambda p: None))


def _dtypes(trial: Trial, strategies: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """The dtypes of all matrix products of a forward pass, and of stored parameters and gradients.

    Excludes routers, which compute in float32 on purpose, and attention, where torch chooses.
    """
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not left_out and func in (
                torch.ops.aten.mm.default,
                torch.ops.aten.addmm.default,
                torch.ops.aten.bmm.default,
            ):
                seen.update(str(a.dtype) for a in args if isinstance(a, torch.Tensor))
            return func(*args, **(kwargs or {}))

    applied = trial.apply(strategies)
    left_out: list[Any] = []
    for part in applied.parts:
        for module in {**applied.spec.routers_of(part), **applied.spec.attention_of(part)}.values():
            module.register_forward_pre_hook(lambda module, args: left_out.append(module))
            module.register_forward_hook(lambda module, args, result: left_out.clear())
    with Watch(), torch.no_grad():
        forward_backward(applied, trial, 0)
    forward_backward(applied, trial, 0)
    params = applied.parameters()
    return seen, {str(p.dtype) for p in params} | {str(p.grad.dtype) for p in params if p.grad is not None}
