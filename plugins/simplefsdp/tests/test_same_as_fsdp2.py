"""Not near fsdp2's numbers: the same ones. Every loss, norm and parameter of some steps, bitwise, in float32."""

import functools

import pytest
import torch.distributed.fsdp
from chain import Chain
from torch import nn

pytest.importorskip("plait_fsdp2")

from plait import ModelSpec, Precision
from plait_testing.models import VOCAB, llama3, moe
from plait_testing.parity import apart, unequal
from plait_testing.trial import Trial, train

BLOCK, AUTO, ALL = ["bucket_block"], ["bucket_auto", "reorder", "memory"], ["bucket_block", "reorder"]
HYBRID, SLOW = {"replicate": 2}, pytest.mark.slow
TENSOR = {"tensor_parallel": {"degree": 2}}
two = functools.partial(moe, n_layers=2)  # a dense block and one with experts
uneven = functools.partial(llama3, ffn_dim=50, vocab_size=67)
uneven_chain = functools.partial(Chain, inner=51, vocab=67)


def both(ranks, trial, options, passes, beside=None, world=4):
    """The results of fsdp2 without a compiler, and of simplefsdp; on every rank."""
    remat = "none" if trial.remat == "budget" else trial.remat  # fsdp2 has no compiler here
    plain = Trial(trial.model, dtype=trial.dtype, micro=trial.micro, remat=remat, steps=trial.steps)
    beside = beside or {}
    theirs = ranks.once(train, plain, {**beside, "fsdp2": options}, world=world)
    ours = ranks.run(train, trial, {**beside, "simplefsdp": {**options, "passes": passes}}, world=world, timeout=240)
    return zip(theirs, ours, strict=True)


def same(pairs):
    for theirs, ours in pairs:
        assert unequal(ours.initial, theirs.initial) is None
        assert ours.losses == theirs.losses
        assert ours.norms == theirs.norms
        assert unequal(ours.final, theirs.final) is None
        assert unequal(ours.buffers, theirs.buffers) is None
        assert ours.placements == theirs.placements


# From torch 2.15 on, fsdp2's parameters receive gradients in the dtype of reduction: what a norm's weight gets of each
# position is summed in float32 and rounded to bfloat16 after. simplefsdp's, which a hook makes, are rounded before.
SUMS_OTHERWISE = hasattr(torch.distributed.fsdp, "GradientReductionHandle")  # came with it


def same_but_for_norms(pairs):
    """After the first step: later ones begin at parameters that differ."""
    for theirs, ours in pairs:
        assert ours.losses == theirs.losses
        apart_by = {n: float((ours.gradients[n] - g).norm() / g.norm()) for n, g in theirs.gradients.items()}
        assert max(apart_by.values()) < 2**-7  # a rounding to bfloat16
        assert all("norm" in name for name, distance in apart_by.items() if distance)


compare, STEPS = (same_but_for_norms, {"steps": 1}) if SUMS_OTHERWISE else (same, {})


# Four ranks where their number or the copies matter; two, which compile in a quarter of the time, for what is left.
WAYS = [
    *((None, [], options, 4) for options in (HYBRID, {})),
    *(("aot_eager", passes, {}, 2) for passes in ([], BLOCK, AUTO)),
    *(("aot_eager", ALL, options, 4) for options in ({}, HYBRID)),
]


@pytest.mark.parametrize(
    ("compile", "passes", "options", "world", "steps"),
    [(None, [], {}, 2, 5), *(pytest.param(*way, 20, marks=SLOW) for way in WAYS)],
)
def test_bitwise(plait_ranks, compile, passes, options, world, steps):
    same(
        both(plait_ranks, Trial("llama3", dtype="float32", compile=compile, steps=steps), options, passes, None, world)
    )


@SLOW
@pytest.mark.parametrize(
    ("model", "world", "steps"),
    [(uneven_chain, 2, 5), pytest.param(uneven, 3, 20, marks=SLOW)],
    ids=["chain-2", "llama3-3"],
)
def test_uneven_shards(plait_ranks, model, world, steps):
    same(both(plait_ranks, Trial(model, dtype="float32", compile="aot_eager", steps=steps), {}, ALL, world=world))


@SLOW
@pytest.mark.parametrize("model", ["tied", "odd", "mla", "qk_norm"])
def test_other_models(plait_ranks, model):
    same(both(plait_ranks, Trial(model, dtype="float32", compile="aot_eager", steps=20), {}, ALL, world=2))


@SLOW
def test_accumulation(plait_ranks):
    same(both(plait_ranks, Trial("llama3", dtype="float32", compile="aot_eager", micro=2), {}, ALL, world=2))


@SLOW
@pytest.mark.parametrize(
    ("model", "remat"),
    [(Chain, "full"), *(("llama3", remat) for remat in ("full", "selective", "budget"))],
)
def test_recomputation(plait_ranks, model, remat):
    same(both(plait_ranks, Trial(model, dtype="float32", compile="aot_eager", remat=remat), {}, ALL, world=2))


@pytest.mark.parametrize(
    ("compile", "world"), [(None, 2), *(pytest.param(c, w, marks=SLOW) for c, w in ((None, 4), ("aot_eager", 2)))]
)
def test_mixed_precision(plait_ranks, compile, world):
    trial = Trial("llama3", dtype="mixed", compile=compile, **STEPS)
    compare(both(plait_ranks, trial, {}, ALL, world=world))


@SLOW
def test_beside_tensor_parallel(plait_ranks):
    """Compiled, it is beside experts, too: below."""
    pytest.importorskip("plait_tensor_parallel")
    same(both(plait_ranks, Trial("llama3", dtype="float32", steps=20), {}, [], TENSOR))


@SLOW
def test_beside_experts(plait_ranks):
    """Gloo's sum over 4 ranks cuts a buffer into 8 segments, rounded up, and each segment's order of addition is its
    own. If a rank's part has an odd number of elements, the segments straddle the parts, and the last bit of an element
    depends on what shares its buffer. So the parts are even here."""
    pytest.importorskip("plait_expert_parallel")
    trial = Trial(functools.partial(two, q_lora_rank=16), dtype="float32", steps=8)
    same(both(plait_ranks, trial, {}, [], {"expert_parallel": {"degree": 2}}))


@SLOW
def test_beside_both(plait_ranks):
    pytest.importorskip("plait_tensor_parallel")
    pytest.importorskip("plait_expert_parallel")
    beside = {**TENSOR, "expert_parallel": {"degree": 2}}
    same(both(plait_ranks, Trial(two, dtype="float32", compile="aot_eager", steps=8), {}, ALL, beside))


@SLOW
def test_inductor_is_near(plait_ranks):
    """It fuses, and so rounds otherwise: within 1e-5, as in float32 every layout is."""
    trial = Trial("llama3", dtype="float32", compile="inductor")
    for theirs, ours in both(plait_ranks, trial, {}, ALL, world=2):
        assert apart(ours.losses, theirs.losses)[0] < 1e-5
        assert max(float((ours.gradients[n] - g).norm() / g.norm()) for n, g in theirs.gradients.items()) < 1e-5


class Shared(nn.Module):
    """Two blocks that share their matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.layers[1].weight = self.layers[0].weight
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens, positions=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)

    def spec(self):
        matrices, biases = ("embedding.weight", "layers.*.weight", "head.weight"), ("layers.*.bias", "head.bias")
        axes = dict.fromkeys(matrices, (None, None)) | dict.fromkeys(biases, (None,))
        init = dict.fromkeys((*matrices, *biases), lambda row, generator: row.normal_(0, 0.1, generator=generator))
        return ModelSpec(axes=axes, blocks=("layers.*",), init=init)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=SLOW), "full"])
def test_tied_inside_blocks(plait_ranks, remat):
    """fsdp2 refuses that. A block that is computed again must not leave what it gathered to the next step."""
    (one,) = plait_ranks.run(train, Trial(Shared, steps=5), world=1)
    for result in plait_ranks.run(train, Trial(Shared, remat=remat, steps=5), {"simplefsdp": {}}, world=2):
        assert apart(result.losses, one.losses)[0] < 1e-9
        assert apart(result.norms, one.norms)[0] < 1e-9


class Narrow(Trial):
    def precision(self):
        return Precision("bfloat16", "bfloat16", "float32")


COPIES = [HYBRID, *(pytest.param(x, marks=SLOW) for x in ({"shard": 2, "replicate": 2}, {"shard": 1, "replicate": 4}))]


@pytest.mark.parametrize("options", COPIES, ids=str)
def test_copies_are_summed_in_the_dtype_of_reduction(plait_ranks, options):
    trial = Narrow("llama3", **STEPS)
    theirs = plait_ranks.run(train, trial, {"fsdp2": options}, world=4)
    ours = plait_ranks.run(train, trial, {"simplefsdp": {**options, "passes": []}}, world=4)
    compare(zip(theirs, ours, strict=True))
