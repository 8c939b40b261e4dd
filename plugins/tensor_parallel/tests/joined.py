"""A decoder whose attention has one matrix for queries and fewer keys and values, and norms over all heads."""

import torch
from torch import nn

from plait import ModelSpec, UnequalParts
from plait.ops import CausalAttention, Constant, Normal
from plait_testing.models import VOCAB

DIM, HEADS, GROUPS, WIDTH = 16, 4, 2, 4
ROWS = UnequalParts((("heads", WIDTH), ("kv_heads", WIDTH), ("kv_heads", WIDTH)))


class NormOverHeads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * self.weight * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * GROUPS) * WIDTH)
        self.q_norm, self.k_norm = NormOverHeads(HEADS * WIDTH), NormOverHeads(GROUPS * WIDTH)
        self.out, self.inner = nn.Linear(HEADS * WIDTH, DIM, bias=False), CausalAttention()

    def forward(self, x, positions=None):
        qkv = self.qkv(x)
        groups = max(1, qkv.shape[-1] // WIDTH // (HEADS // GROUPS + 2))  # of this rank
        heads = qkv.shape[-1] // WIDTH - 2 * groups
        q, k, v = qkv.split([heads * WIDTH, groups * WIDTH, groups * WIDTH], -1)
        q, k, v = (each.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for each in (self.q_norm(q), self.k_norm(k), v))
        return self.out(self.inner(q, k, v, positions).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(DIM), Attention()

    def forward(self, x, positions=None):
        return x + self.attention(self.norm(x), positions)


class JoinedRows(nn.Module):
    """rows: the axis of the rows of the fused matrix. across: modules that combine all units."""

    def __init__(self, rows=ROWS, across=("layers.*.attention.q_norm", "layers.*.attention.k_norm")):
        super().__init__()
        self.rows, self.across = rows, across
        self.embedding, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))

    def spec(self):
        axes = {
            "embedding.weight": ("vocab", "embed"),
            "head.weight": ("vocab", "embed"),
            "norm.weight": ("embed",),
            "layers.*.norm.weight": ("embed",),
            "layers.*.attention.qkv.weight": (self.rows, "embed"),
            "layers.*.attention.qkv.bias": (self.rows,),
            "layers.*.attention.*_norm.weight": (None,),
            "layers.*.attention.out.weight": ("embed", "heads"),
        }
        init = {name: Constant(1.0) if "norm" in name else Normal(0.3) for name in axes}
        return ModelSpec(
            axes,
            blocks=("layers.*",),
            branches=("layers.*.attention",),
            attention="layers.*.attention.inner",
            sizes={"heads": HEADS, "kv_heads": GROUPS},
            across={pattern: "kv_heads" if "k_" in pattern else "heads" for pattern in self.across},
            init=init,
        )
