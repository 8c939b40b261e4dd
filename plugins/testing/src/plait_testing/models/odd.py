"""A model that differs from Llama in everything a strategy might assume: names, biases, LayerNorm, a GELU MLP, learned
positions, a tied head with its own bias, and a buffer that is not in checkpoints.

Shapes: B batch, T tokens, V vocabulary, D model width, H heads, E width of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from plait import ModelSpec
from plait.ops import CausalAttention, Flops, Normal, ones, zeros


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.core = CausalAttention()

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        q, k, v = (w(x_BTD).unflatten(-1, (-1, self.head_width)) for w in (self.query, self.key, self.value))
        out_BHTE = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), positions_BT)
        return self.proj(out_BHTE.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Unit(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.att = SelfAttention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, inner)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.att(self.ln1(x_BTD), positions_BT)
        return x_BTD + self.mlp(self.ln2(x_BTD))


class Odd(nn.Module):
    slots: Tensor

    def __init__(
        self,
        *,
        width: int = 32,
        depth: int = 2,
        heads: int = 4,
        inner: int = 64,
        vocab_size: int = 64,
        max_seq_len: int = 64,
    ) -> None:
        super().__init__()
        self.heads, self.attention_flops = heads, depth * 2 * width
        self.words = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(max_seq_len, width)
        self.register_buffer("slots", torch.empty(max_seq_len, dtype=torch.int64), persistent=False)
        self.trunk: Any = nn.Module()
        self.trunk.units = nn.ModuleList(Unit(width, heads, inner) for _ in range(depth))
        self.trunk.ln = nn.LayerNorm(width)
        self.readout = nn.Linear(width, vocab_size)
        self.readout.weight = self.words.weight

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        places_BT = self.slots[: tokens_BT.shape[1]].expand_as(tokens_BT) if positions_BT is None else positions_BT
        x_BTD = self.words(tokens_BT) + self.places(places_BT)
        for unit in self.trunk.units:
            x_BTD = unit(x_BTD, positions_BT)
        return self.readout(self.trunk.ln(x_BTD))

    def spec(self) -> ModelSpec:
        return ModelSpec(
            axes={
                "words.weight": ("vocab", "embed"),
                "places.weight": (None, "embed"),
                "trunk.units.*.att.query.weight": ("heads", "embed"),
                "trunk.units.*.att.query.bias": ("heads",),
                "trunk.units.*.att.key.weight": ("heads", "embed"),
                "trunk.units.*.att.key.bias": ("heads",),
                "trunk.units.*.att.value.weight": ("heads", "embed"),
                "trunk.units.*.att.value.bias": ("heads",),
                "trunk.units.*.att.proj.weight": ("embed", "heads"),
                "trunk.units.*.att.proj.bias": ("embed",),
                "trunk.units.*.mlp.up.weight": ("ffn", "embed"),
                "trunk.units.*.mlp.up.bias": ("ffn",),
                "trunk.units.*.mlp.down.weight": ("embed", "ffn"),
                "trunk.units.*.mlp.down.bias": ("embed",),
                "trunk.units.*.ln*.*": ("embed",),
                "trunk.ln.*": ("embed",),
                "readout.weight": ("vocab", "embed"),
                "readout.bias": ("vocab",),
            },
            blocks=("trunk.units.*",),
            sizes={"heads": self.heads},
            branches=("trunk.units.*.att", "trunk.units.*.mlp"),
            attention="trunk.units.*.att.core",
            init={
                "slots": arange,
                "words.weight": Normal(0.1),
                "places.weight": Normal(0.1),
                "trunk.units.*.ln*.weight": ones,
                "trunk.units.*.ln*.bias": zeros,
                "trunk.units.*.*.*.weight": Normal(0.1),
                "trunk.units.*.*.*.bias": Normal(0.1),  # not zero, so that a bias counted twice is visible
                "trunk.ln.weight": ones,
                "trunk.ln.bias": zeros,
                "readout.weight": Normal(0.1),
                "readout.bias": Normal(0.1),
            },
            head="readout",
            before=("words", "places"),
            after=("trunk.ln", "readout"),
            flops=Flops(
                parameters=sum(p.numel() for p in self.parameters()) - self.places.weight.numel(),
                attention=self.attention_flops,
            ),
        )


def arange(tensor: Tensor, generator: Generator | None = None) -> Tensor:
    return tensor.copy_(torch.arange(len(tensor)))
