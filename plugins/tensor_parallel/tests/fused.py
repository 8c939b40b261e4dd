"""A decoder without attention whose feed-forwards hold the gate and the other matrix in one parameter."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from plait import ModelSpec, Packed
from plait.ops import Constant, Normal, grouped_linear
from plait_testing.models import VOCAB

DIM, INNER, EXPERTS = 16, 24, 4


class FeedForward(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate_up = nn.Linear(DIM, 2 * INNER, bias=bias)
        self.down = nn.Linear(INNER, DIM, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, DIM))
        self.bias = nn.Parameter(torch.empty(EXPERTS, 2 * INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, DIM, INNER))

    def forward(self, rows, counts):
        inner = grouped_linear(rows, self.gate_up, counts)
        gate, up = (inner + self.bias.repeat_interleave(counts, 0, output_size=len(rows))).chunk(2, -1)
        return grouped_linear(F.silu(gate) * up, self.down, counts)


class Mixture(nn.Module):
    """A token visits the expert of its place in the row."""

    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        rows = x.transpose(0, 1).flatten(0, 1)
        counts = torch.full((EXPERTS,), len(rows) // EXPERTS, device=x.device)
        return self.experts(rows, counts).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.norm, self.feed_forward, self.mixture = nn.RMSNorm(DIM), FeedForward(bias), Mixture()

    def forward(self, x):
        x = x + self.feed_forward(self.norm(x))
        return x + self.mixture(x)


class Fused(nn.Module):
    """rows: the axis of the rows of the fused matrices. bias: whether the dense one has one."""

    def __init__(self, rows, bias=False):
        super().__init__()
        self.rows = rows
        self.embedding, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList([Block(bias), Block(bias)])
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def spec(self):
        axes = {
            "embedding.weight": ("vocab", "embed"),
            "head.weight": ("vocab", "embed"),
            "norm.weight": ("embed",),
            "layers.*.norm.weight": ("embed",),
            "layers.*.feed_forward.gate_up.weight": (self.rows, "embed"),
            "layers.*.feed_forward.gate_up.bias": (self.rows,),
            "layers.*.feed_forward.down.weight": ("embed", "ffn"),
            "layers.*.mixture.experts.gate_up": ("experts", self.rows, "embed"),
            "layers.*.mixture.experts.bias": ("experts", self.rows),
            "layers.*.mixture.experts.down": ("experts", "embed", "ffn"),
        }
        init = {name: Constant(1.0) if "norm" in name else Normal(0.3) for name in axes}
        return ModelSpec(axes, blocks=("layers.*",), branches=("layers.*.feed_forward", "layers.*.mixture"), init=init)


fused = functools.partial(Fused, Packed("ffn", 2))
