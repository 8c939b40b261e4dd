"""Attention's keywords mean the same on divided sequences, and those that a method does not know are refused."""

import attrs
import pytest
import torch
from torch import nn

from plait.ops import Normal
from plait.testing import assert_same
from plait_models.gqa import GroupedQueryAttention
from plait_models.llama3 import Llama3
from plait_testing.parity import worst_gradient
from plait_testing.pool import RankError
from plait_testing.trial import Trial, train

METHODS = ("gather", "ring", "ulysses")


class Keyed(GroupedQueryAttention):
    """Queries, keys and values without RoPE; every keyword in one layer or the other."""

    def forward(self, x, positions, turns):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        out = self.inner(q, k, v, positions, **self.how, **sinks)
        return self.wo(out.transpose(1, 2).flatten(-2))


class Model(Llama3):
    def __init__(self, how):
        super().__init__(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=64)
        for block in self.layers.values():
            attention = block.attention
            attention.__class__, attention.how = Keyed, {k: v for k, v in how.items() if k != "sinks"}
            attention.sinks = nn.Parameter(torch.empty(4)) if "sinks" in how else None

    def spec(self):
        spec, sinks = super().spec(), "layers.*.attention.sinks"
        if all(block.attention.sinks is None for block in self.layers.values()):
            return spec
        axes, init = {sinks: ("heads",), **spec.axes}, {sinks: Normal(1.0), **spec.init}
        return attrs.evolve(spec, axes=axes, init=init, elementwise=(sinks,))


CASES = {
    "window": {"window": 5},
    "window of one": {"window": 1},
    "scale and cap": {"scale": 90.0, "softcap": 0.5},
    "sinks": {"sinks": True},
    "all": {"window": 6, "scale": 90.0, "softcap": 0.5, "sinks": True},
}
QUICK = {("window", "gather"), ("all", "ring")}
PAIRS = [(case, method) for case in CASES for method in METHODS]


@pytest.mark.parametrize(
    ("case", "method"), [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
)
def test_keywords(plait_ranks, case, method):
    trial = Trial(lambda: Model(CASES[case]), steps=2, documents=case == "all")
    expected = plait_ranks.run(train, trial, world=1)[0]
    other = plait_ranks.run(train, attrs.evolve(trial, model=lambda: Model({})), world=1)[0]
    assert worst_gradient(other, expected)[0] > 0.01  # the keyword makes a difference
    beside = {"tensor_parallel": {"degree": 2}} if case == "all" else {}
    under = {"context_parallel": {"degree": 2, "method": method}, "fsdp2": {}, **beside}
    assert_same(plait_ranks.run(train, trial, under, world=4), expected)


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_keyword_is_refused_by_name(plait_ranks, method):
    under, slopes = {"context_parallel": {"degree": 2, "method": method}, "fsdp2": {}}, torch.ones(4)
    with pytest.raises(RankError, match=rf"keyword 'slopes', which strategy\.context_parallel\.method={method}"):
        plait_ranks.run(train, Trial(lambda: Model({"slopes": slopes}), steps=1), under, world=2)
