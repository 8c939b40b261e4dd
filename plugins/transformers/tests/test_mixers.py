"""Mixers of hybrids that tensor parallelism divides by heads or channels, against one process."""

import pytest
import torch
import torch.nn.functional as F
from families import built
from test_families import check
from torch import nn

from plait import Packed, UnequalParts
from plait_transformers import mixers
from plait_transformers.build import decoder
from plait_transformers.watch import watching

pytestmark = pytest.mark.usefixtures("fresh")

TENSORS = {"tensor_parallel": {"degree": 2}}
DELTA = UnequalParts((("mixer_heads", 8), ("mixer_heads", 8), ("mixer_heads", 16)))  # two value heads for a key head
MAMBA = UnequalParts((("mixer_heads", 8), ("mixer_heads", 8), (None, 16), ("mixer_heads", 1)))
CONVOLVED = UnequalParts((("mixer_heads", 8), (None, 16)))
DIVIDED = {  # family, part of a block -> axes of its parameters
    ("qwen3_next", "linear_attn"): {
        "in_proj_qkvz.weight": ("mixer_heads", "embed"),
        "in_proj_ba.weight": ("mixer_heads", "embed"),
        "conv1d.weight": (DELTA, None, None),
        "A_log": ("mixer_heads",),
        "dt_bias": ("mixer_heads",),
        "norm.weight": (None,),
        "out_proj.weight": ("embed", "mixer_heads"),
    },
    ("lfm2", "conv"): {
        "in_proj.weight": (Packed("mixer_heads", 3), "embed"),
        "conv.weight": ("mixer_heads", None, None),
        "out_proj.weight": ("embed", "mixer_heads"),
    },
    ("bamba", "mamba"): {
        "in_proj.weight": (MAMBA, "embed"),
        "conv1d.weight": (CONVOLVED, None, None),
        "conv1d.bias": (CONVOLVED,),
        "A_log": ("mixer_heads",),
        "D": ("mixer_heads",),
        "dt_bias": ("mixer_heads",),
        "norm.weight": (None,),
        "out_proj.weight": ("embed", "mixer_heads"),
    },
}


@pytest.mark.parametrize(
    ("kind", "part"), [pytest.param(*at, marks=pytest.mark.slow if at[0] == "bamba" else ()) for at in DIVIDED]
)
def test_axes_of_a_mixer(kind, part):
    axes, prefix = built(kind).spec().axes, f"model.layers.*.{part}."
    found = {name.removeprefix(prefix): its for name, its in axes.items() if name.startswith(prefix)}
    assert found == DIVIDED[kind, part]


@pytest.mark.parametrize(
    ("kind", "part", "why"),
    [
        ("mamba", "backbone.layers.*.mixer", "changes what the others do"),
        pytest.param(
            *("falcon_h1", "model.layers.*.mamba", "its buffer 'mup_vector' has values for each head"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_does_not_divide_stays_whole(kind, part, why):
    assert why in built(kind).facts.whole[part]


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, other):
        return F.rms_norm(x, x.shape[-1:], self.weight)


class Mixer(nn.Module):
    """Channels that are computed without each other, but for a norm over all."""

    def __init__(self, other):
        super().__init__()
        self.reads, self.writes = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.conv, self.norm, self.other = nn.Conv1d(8, 8, 2, padding=1, groups=8), Norm(8), other

    def forward(self, x):
        mixed = self.conv(self.reads(x).transpose(1, 2))[..., :-1].transpose(1, 2)
        return self.writes(self.norm(mixed, self.other))


@pytest.mark.parametrize("other", [None, 1e-5, torch.ones(3), torch.ones(8)], ids=["nothing", "a number", "3", "8"])
def test_a_norm_over_all_channels_may_get_anything_beside_them(other):
    model = nn.Sequential(Mixer(other)).double()
    with watching(model) as watch:
        model(torch.randn(2, 4, 6, dtype=torch.float64))
    division = next(mixers.of_mixer("0", model[0], watch.calls["0"], ["0.reads"], "0.writes", watch))
    assert (division.across, division.units) == ({"0.norm": "mixer_heads"}, 8)
    assert division.axes["0.conv.weight"] == ("mixer_heads", None, None)


@pytest.mark.slow
def test_heads_are_counted_at_any_size():
    """Of Qwen3-Next's usual sizes: 16 key heads, 32 value heads."""
    with torch.device("meta"):
        spec = decoder(config={"model_type": "qwen3_next", "num_hidden_layers": 4, "vocab_size": 64}).spec()
    assert spec.sizes["mixer_heads"] == 16


@pytest.mark.slow
def test_a_wrong_order_of_channels_stays_whole(monkeypatch):
    """As if a rank had its share of all channels, not of each part: the halves do not add up."""
    right = mixers._axis
    monkeypatch.setattr(mixers, "_axis", lambda parts: "mixer_heads" if len(parts) > 1 else right(parts))
    assert "model.layers.*.linear_attn" in built("qwen3_next").facts.whole


@pytest.mark.parametrize("kind", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process(kind, plait_ranks):
    check(plait_ranks, kind, TENSORS, 2, documents=True)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2", "bamba", "nemotron_h"])
def test_beside_fsdp2(kind, documents, plait_ranks):
    check(plait_ranks, kind, {**TENSORS, "fsdp2": {}}, 4, documents=documents)
