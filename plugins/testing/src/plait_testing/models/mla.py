"""Multi-head latent attention with a dense feed-forward, an optional low rank for queries, few and odd widths.

Heads of queries and keys are wider than heads of values.

Shapes: B batch, T tokens, V vocabulary, D model width.
"""

from torch import Tensor, nn

from plait import ModelSpec
from plait.ops import DocumentMask, Flops, Normal, ones
from plait_models import mla
from plait_models.decoder import Block
from plait_models.layers import Rope
from plait_models.swiglu import SwiGLU


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
            attention = mla.LatentAttention(dim, n_heads, q_rank, kv_rank, nope_dim, rope_dim, value_dim, 1e-6)
            self.layers[str(layer)] = Block(dim, 1e-6, attention, SwiGLU(dim, ffn_dim))
        self.rope = Rope(rope_dim, 10_000.0)
        self.documents = DocumentMask()
        self.norm = nn.RMSNorm(dim, 1e-6)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        turns = self.rope(tokens_BT, positions_BT, x_BTD.dtype)
        documents = None if positions_BT is None else self.documents(positions_BT, x_BTD.dtype)
        for block in self.layers.values():
            x_BTD = block(x_BTD, documents, turns)
        return self.head(self.norm(x_BTD))

    def spec(self) -> ModelSpec:
        return ModelSpec(
            axes={
                **mla.axes("layers.*.attention", self.low_rank_queries),
                "layers.*.feed_forward.w2.weight": ("embed", "ffn"),
                "layers.*.feed_forward.w*.weight": ("ffn", "embed"),
                "layers.*.*_norm.weight": ("embed",),
                "norm.weight": ("embed",),
                "*.weight": ("vocab", "embed"),
            },
            blocks=("layers.*",),
            sizes=self.sizes,
            branches=("layers.*.attention", "layers.*.feed_forward"),
            attention="layers.*.attention.inner",
            documents="documents",
            init={
                "embed.weight": Normal(1.0),
                **mla.init("layers.*.attention", Normal(0.1), Normal(0.1)),
                "layers.*.feed_forward.*.weight": Normal(0.1),
                "layers.*.*.weight": ones,
                "norm.weight": ones,
                "head.weight": Normal(0.1),
            },
            head="head",
            before=("embed",),
            after=("norm", "head"),
            flops=Flops(
                parameters=sum(p.numel() for p in self.parameters()) - self.embed.weight.numel(),
                attention=self.attention_flops,
            ),
        )
