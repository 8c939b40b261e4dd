"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), the queries' low rank optional.

Keys and values come out of one normed latent; a part of each key that RoPE turns is shared by all heads. Heads of
queries and keys are wider than heads of values.

Shapes: B batch, T tokens, V vocabulary, D model width, H heads, R turned and N unturned numbers of a query or key
head, E width of a value head, L the latent's width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from plait.models.flops import Flops
from plait.models.init import Normal, ones
from plait.models.layers import CausalAttention, Rope, SwiGLU
from plait.spec import ModelSpec


class LowRank(nn.Module):
    """Down to `rank`, a norm, and up again: only `up` has heads."""

    def __init__(self, dim: int, rank: int, out: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.norm = nn.RMSNorm(rank, 1e-6)
        self.up = nn.Linear(rank, out, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x_BTD)))


class Attention(nn.Module):
    def __init__(
        self, dim: int, n_heads: int, q_rank: int | None, kv_rank: int, nope: int, rope: int, value: int
    ) -> None:
        super().__init__()
        self.nope, self.turned, self.value, self.kv_rank = nope, rope, value, kv_rank
        out = n_heads * (nope + rope)
        self.wq = nn.Linear(dim, out, bias=False) if q_rank is None else LowRank(dim, q_rank, out)
        self.wkv_down = nn.Linear(dim, kv_rank + rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank, 1e-6)
        self.wkv_up = nn.Linear(kv_rank, n_heads * (nope + value), bias=False)
        self.wo = nn.Linear(n_heads * value, dim, bias=False)
        self.rope = Rope(rope, 10_000.0)
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        q_BTH_ = self.wq(x_BTD).unflatten(-1, (-1, self.nope + self.turned))
        q_BTHN, q_BTHR = q_BTH_.split([self.nope, self.turned], dim=-1)
        latent_BTL, k_BTR = self.wkv_down(x_BTD).split([self.kv_rank, self.turned], dim=-1)
        kv_BTH_ = self.wkv_up(self.kv_norm(latent_BTL)).unflatten(-1, (-1, self.nope + self.value))
        k_BTHN, v_BTHE = kv_BTH_.split([self.nope, self.value], dim=-1)
        q_BTHR, k_BT1R = self.rope(q_BTHR, k_BTR.unsqueeze(2), positions_BT)
        q = torch.cat([q_BTHN, q_BTHR], dim=-1)
        k = torch.cat([k_BTHN, k_BT1R.expand_as(q_BTHR)], dim=-1)
        out_BHTE = self.inner(q.transpose(1, 2), k.transpose(1, 2), v_BTHE.transpose(1, 2), positions_BT)
        return self.wo(out_BHTE.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, ffn_dim: int, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, 1e-6)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, 1e-6)
        self.feed_forward = SwiGLU(dim, ffn_dim)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions_BT)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Mla(nn.Module):
    def __init__(
        self,
        *,
        dim: int = 32,
        n_layers: int = 2,
        n_heads: int = 4,
        q_rank: int | None = 12,
        kv_rank: int = 16,
        nope_dim: int = 8,
        rope_dim: int = 4,
        value_dim: int = 6,
        ffn_dim: int = 64,
        vocab_size: int = 64,
        max_seq_len: int = 64,
    ) -> None:
        super().__init__()
        self.sizes = {"heads": n_heads}
        self.low_rank_queries = q_rank is not None
        self.attention_flops = n_layers * n_heads * (nope_dim + rope_dim + value_dim)
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict()
        for layer in range(n_layers):
            attention = Attention(dim, n_heads, q_rank, kv_rank, nope_dim, rope_dim, value_dim)
            self.layers[str(layer)] = Block(dim, ffn_dim, attention)
        self.norm = nn.RMSNorm(dim, 1e-6)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.layers.values():
            x_BTD = block(x_BTD, positions_BT)
        return self.head(self.norm(x_BTD))

    def spec(self) -> ModelSpec:
        axes: dict[str, tuple[str | None, ...]] = {"layers.*.attention.wq.weight": ("heads", "embed")}
        init: dict[str, Any] = {}
        if self.low_rank_queries:
            axes = {  # what all heads share has no axis to be divided along
                "layers.*.attention.wq.down.weight": (None, "embed"),
                "layers.*.attention.wq.norm.weight": (None,),
                "layers.*.attention.wq.up.weight": ("heads", None),
            }
            init = {
                "layers.*.attention.wq.norm.weight": ones,
                "layers.*.attention.wq.*.weight": Normal(0.1),
            }
        return ModelSpec(
            axes={
                "embed.weight": ("vocab", "embed"),
                **axes,
                "layers.*.attention.wkv_down.weight": (None, "embed"),
                "layers.*.attention.kv_norm.weight": (None,),
                "layers.*.attention.wkv_up.weight": ("heads", None),
                "layers.*.attention.wo.weight": ("embed", "heads"),
                "layers.*.feed_forward.w1.weight": ("ffn", "embed"),
                "layers.*.feed_forward.w2.weight": ("embed", "ffn"),
                "layers.*.feed_forward.w3.weight": ("ffn", "embed"),
                "layers.*.attention_norm.weight": ("embed",),
                "layers.*.ffn_norm.weight": ("embed",),
                "norm.weight": ("embed",),
                "head.weight": ("vocab", "embed"),
            },
            blocks=("layers.*",),
            sizes=self.sizes,
            branches=("layers.*.attention", "layers.*.feed_forward"),
            attention="layers.*.attention.inner",
            init={
                "embed.weight": Normal(1.0),
                **init,
                "layers.*.attention.kv_norm.weight": ones,
                "layers.*.attention.*.weight": Normal(0.1),
                "layers.*.feed_forward.*.weight": Normal(0.1),
                "layers.*.*.weight": ones,
                "norm.weight": ones,
                "head.weight": Normal(0.1),
            },
            flops=Flops(
                parameters=sum(p.numel() for p in self.parameters()) - self.embed.weight.numel(),
                attention=self.attention_flops,
            ),
        )
