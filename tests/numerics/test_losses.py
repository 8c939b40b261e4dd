"""A loss of a plugin has the gradients of one process in every layout, whole or by chunks, in both of its forms."""

import inspect
import sys
from unittest import mock

import attrs
import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from plait.ops import cross_entropy_sum
from plait.parallel import plugin_loss, vocab
from plait_testing.parity import apart, worst_gradient
from plait_testing.trial import Trial, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

BOUND = 1e-12  # of a parameter's gradient, and of losses and norms, in float64
WEIGHT, STEPS = 0.1, 2


@attrs.frozen
class OfParts:
    """Cross-entropy, and the square of each token's logsumexp. wrong: a bug of this loss."""

    wrong: str = ""
    sharded = True

    def summed(self, logits, labels, vocab):
        z = logits.logsumexp(-1) if self.wrong == "its logsumexp is of a part" else vocab.logsumexp(logits)
        counts = labels != -100
        squares = z.square() if self.wrong == "ignored tokens count" else z.square().where(counts, 0)
        return ((z - vocab.pick(logits, labels)).where(counts, 0) + WEIGHT * squares).sum()


@attrs.frozen
class OfWhole:
    """The same of whole logits."""

    def summed(self, logits, labels, vocab):
        z = logits[labels != -100].logsumexp(-1)
        return cross_entropy_sum(logits, labels) + WEIGHT * z.square().sum()


@attrs.frozen
class ByHand(Trial):
    """Its loss is written once more, without a plugin."""

    def apply(self, strategies, extra=()):
        applied = super().apply(strategies, extra)
        applied.loss = self.entropy_and_squares
        return applied

    def entropy_and_squares(self, logits, labels):
        z = logits[labels != -100]
        entropy = F.cross_entropy(z, labels[labels != -100], reduction="sum")
        return entropy + WEIGHT * torch.log(torch.exp(z).sum(-1)).pow(2).sum()


LAYOUTS = {
    "one process": (1, {}),
    "fsdp2": (2, {"fsdp2": {}}),
    "tensor_parallel": (2, {"tensor_parallel": {"degree": 2}}),
    "pipeline": (2, {"pipeline": {"degree": 2}}),
    "context_parallel": (2, {"context_parallel": {"degree": 2}, "fsdp2": {}}),
    "pipeline and tensor_parallel": (4, {"pipeline": {"degree": 2}, "tensor_parallel": {"degree": 2}}),
}


@pytest.fixture(scope="module")
def reference(plait_ranks):
    return plait_ranks.run(train, ByHand(steps=STEPS), world=1)[0]


def off(results, reference):
    """How far the worst gradient, loss or norm of any rank is from the reference."""
    errors = [worst_gradient(result, reference) for result in results]
    pairs = [(getattr(r, which), getattr(reference, which)) for r in results for which in ("losses", "norms")]
    return max(max(errors)[0], *(apart(*pair)[0] for pair in pairs))


@pytest.mark.parametrize(
    ("loss", "chunks"),
    [
        pytest.param(OfWhole(), 1, id="whole-1", marks=pytest.mark.slow),
        pytest.param(OfWhole(), 4, id="whole-4", marks=pytest.mark.slow),
        pytest.param(OfParts(), 1, id="parts-1"),
        pytest.param(OfParts(), 4, id="parts-4", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plugins_loss_equals_one_process(plait_ranks, reference, layout, loss, chunks):
    world, strategies = LAYOUTS[layout]
    trial = Trial(steps=STEPS, micro=2, chunks=chunks, loss={"squares": loss})
    assert off(plait_ranks.run(train, trial, strategies, world=world), reference) <= BOUND


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(
    ("layout", "wrong"), [("tensor_parallel", "its logsumexp is of a part"), ("one process", "ignored tokens count")]
)
def test_a_wrong_loss_is_found(plait_ranks, reference, layout, wrong, chunks):
    world, strategies = LAYOUTS[layout]
    trial = Trial(steps=STEPS, micro=2, chunks=chunks, loss={"squares": OfParts(wrong)})
    assert off(plait_ranks.run(train, trial, strategies, world=world), reference) > 1e-3


PLANTED = {
    "the parts' sums of exp are not added": ('reduced((logits - most[..., None]).exp_().sum(-1), "sum", axis)',
        "(logits - most[..., None]).exp_().sum(-1)"),
    "the gradient of a sum is added over the two ranks": ("return grad, None", "return 2 * grad, None"),
    "every rank picks a logit": ("mine = mine & (at >= 0) & (at < logits.shape[-1])", "at = at % logits.shape[-1]"),
    "each part has its own greatest": ('reduced(wide(logits.amax(-1)), "max", axis)', "wide(logits.amax(-1))"),
    "parts begin at 0": ("self.size // self.axis.size() * self.axis.get_local_rank()", "0"),
}  # fmt: skip


def train_with_bug(old, new, trial, strategies):
    source = inspect.getsource(vocab)
    assert source.count(old) == 1
    changed = {"__name__": vocab.__name__}
    exec(source.replace(old, new), changed)
    with mock.patch.object(plugin_loss, "Vocab", changed["Vocab"]):
        return train(trial, strategies)


@pytest.mark.parametrize(
    "bug", [x if i < 2 else pytest.param(x, marks=pytest.mark.slow) for i, x in enumerate(PLANTED)]
)
def test_a_wrong_sum_over_parts_is_found(plait_ranks, reference, bug):
    trial = Trial(steps=STEPS, micro=2, loss={"squares": OfParts()})
    world, strategies = LAYOUTS["tensor_parallel"]
    results = plait_ranks.run(train_with_bug, *PLANTED[bug], trial, strategies, world=world)
    assert off(results, reference) > 1e-3
