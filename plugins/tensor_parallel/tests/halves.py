"""A decoder as BERT is: of a branch one module reads the stream and another one writes to it, with a norm of the sum
behind it; and the last matrix of its feed-forward is stored transposed, with a bias."""

import torch
import torch.nn.functional as F
from torch import nn

from plait import ModelSpec
from plait.ops import CausalAttention, Constant, Normal
from plait_testing.models import VOCAB

DIM, HEADS, INNER = 16, 4, 32


class Reads(nn.Module):
    """Attention without its last matrix, which views what its matrices return with the shape of the stream."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.inner = CausalAttention()

    def forward(self, x, positions=None):
        shape = (*x.shape[:-1], -1, DIM // HEADS)
        q, k, v = (matrix(x).view(shape).transpose(1, 2) for matrix in (self.q, self.k, self.v))
        return self.inner(q, k, v, positions).transpose(1, 2).reshape(*x.shape[:-1], -1)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, result, x):
        return self.norm(self.dense(result) + x)


class Transposed(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.empty(columns))

    def forward(self, x):
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.reads, self.writes, self.norm = Reads(), Writes(), nn.LayerNorm(DIM)
        self.up, self.down = Transposed(DIM, INNER), Transposed(INNER, DIM)

    def forward(self, x, positions=None):
        x = self.writes(self.reads(x, positions), x)
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Halves(nn.Module):
    """writers, biases: whether its spec names them."""

    def __init__(self, writers=True, biases=True):
        super().__init__()
        self.said = writers, biases
        self.words, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions=None):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)

    def spec(self):
        writers, biases = self.said
        pairs = {"blocks.*.reads": "blocks.*.writes.dense", "blocks.*.up": "blocks.*.down"}
        axes = {
            **dict.fromkeys(("words.weight", "head.weight"), ("vocab", "embed")),
            **{f"blocks.*.reads.{name}.{kind}": a for name in "qkv" for kind, a in MATRIX.items()},
            "blocks.*.writes.dense.weight": ("embed", "heads"),
            "blocks.*.writes.dense.bias": ("embed",),
            "blocks.*.up.weight": ("embed", "ffn"),
            "blocks.*.up.bias": ("ffn",),
            "blocks.*.down.weight": ("ffn", "embed"),
            "blocks.*.down.bias": ("embed",),
            "blocks.*.writes.norm.*": ("embed",),
            "blocks.*.norm.*": ("embed",),
        }
        return ModelSpec(
            axes,
            blocks=("blocks.*",),
            branches=tuple(name for pair in pairs.items() for name in pair),
            writers=pairs if writers else {},
            biases=("blocks.*.down.bias",) if biases else (),
            attention="blocks.*.reads.inner",
            sizes={"heads": HEADS},
            init={name: Constant(1.0) if "norm" in name else Normal(0.3) for name in axes},
        )


MATRIX = {"weight": ("heads", "embed"), "bias": ("heads",)}
