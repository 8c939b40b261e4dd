"""Grouped-query attention with normed queries and keys, as in OLMo 2 and Qwen3 (arXiv:2501.00656, arXiv:2505.09388).

Heads are wider than dim / n_heads, so that nothing may rest on the two being equal.

Shapes: B batch, T tokens, V vocabulary, D model width, H query heads, K key and value heads, E width of a head.
"""

from torch import Tensor, nn

from plait.models.flops import Flops
from plait.models.init import Normal, ones
from plait.models.layers import CausalAttention, Rope, SwiGLU
from plait.spec import ModelSpec


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, 1e-6)
        self.k_norm = nn.RMSNorm(head_dim, 1e-6)
        self.rope = Rope(head_dim, 10_000.0)
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        q_BTHE = self.q_norm(self.wq(x_BTD).unflatten(-1, (-1, self.head_dim)))
        k_BTKE = self.k_norm(self.wk(x_BTD).unflatten(-1, (-1, self.head_dim)))
        v_BTKE = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTHE, k_BTKE = self.rope(q_BTHE, k_BTKE, positions_BT)
        out_BHTE = self.inner(q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), positions_BT)
        return self.wo(out_BHTE.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, 1e-6)
        self.attention = Attention(dim, n_heads, n_kv_heads, head_dim)
        self.ffn_norm = nn.RMSNorm(dim, 1e-6)
        self.feed_forward = SwiGLU(dim, ffn_dim)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions_BT)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class QkNorm(nn.Module):
    def __init__(
        self,
        *,
        dim: int = 32,
        n_layers: int = 2,
        n_heads: int = 8,
        n_kv_heads: int = 4,
        head_dim: int = 8,
        ffn_dim: int = 64,
        vocab_size: int = 64,
        max_seq_len: int = 64,
    ) -> None:
        super().__init__()
        self.sizes = {"heads": n_heads, "kv_heads": n_kv_heads}
        self.attention_flops = n_layers * n_heads * 2 * head_dim
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, n_kv_heads, head_dim, ffn_dim) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim, 1e-6)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.layers:
            x_BTD = block(x_BTD, positions_BT)
        return self.head(self.norm(x_BTD))

    def spec(self) -> ModelSpec:
        return ModelSpec(
            axes={
                "embed.weight": ("vocab", "embed"),
                "layers.*.attention.wq.weight": ("heads", "embed"),
                "layers.*.attention.wk.weight": ("kv_heads", "embed"),
                "layers.*.attention.wv.weight": ("kv_heads", "embed"),
                "layers.*.attention.wo.weight": ("embed", "heads"),
                "layers.*.attention.q_norm.weight": (None,),
                "layers.*.attention.k_norm.weight": (None,),
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
                "layers.*.attention.*_norm.weight": ones,
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
