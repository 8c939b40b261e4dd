"""GPT-2: learned positions, LayerNorm, biases everywhere, an embedding that is also the head.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Dropout is left out.
Shapes: B batch, T tokens, V vocabulary, D model width, H heads, E width of a head.
"""

import torch
from torch import Tensor, nn

from plait import ModelSpec, PlaitError
from plait.ops import CausalAttention, DocumentMask, Flops, Normal, ones, zeros


class Attention(nn.Module):
    """Queries, keys and values are three matrices: a share of a fused one would be all queries and no values."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (w(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return self.out(self.inner(q, k, v, documents).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, n_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim)

    def forward(self, x_BTD: Tensor, documents: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), documents)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Gpt2(nn.Module):
    """Tokens (B, T) to logits (B, T, V). Raises PlaitError, naming `model.n_heads`, if heads do not divide `dim`."""

    def __init__(self, *, dim: int, n_layers: int, n_heads: int, vocab_size: int, max_seq_len: int) -> None:
        if dim % n_heads:
            raise PlaitError(f"model.n_heads is {n_heads}; it must divide model.dim={dim}")
        super().__init__()
        self.n_layers, self.n_heads, self.max_seq_len = n_layers, n_heads, max_seq_len
        self.tokens, self.places = nn.Embedding(vocab_size, dim), nn.Embedding(max_seq_len, dim)
        self.documents = DocumentMask()
        self.blocks = nn.ModuleList(Block(dim, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x_BTD = self.tokens(tokens) + self.places(places.expand_as(tokens))
        documents = None if positions is None else self.documents(positions, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, documents)
        return self.head(self.norm(x_BTD))

    def spec(self) -> ModelSpec:
        multiplied = sum(p.numel() for p in self.parameters()) - self.places.weight.numel()
        attention = self.n_layers * 2 * self.tokens.embedding_dim
        return ModelSpec(
            axes={
                "tokens.weight": ("vocab", "embed"),
                "places.weight": (None, "embed"),
                "blocks.*.attention.out.weight": ("embed", "heads"),
                "blocks.*.attention.out.bias": ("embed",),
                "blocks.*.attention.*.weight": ("heads", "embed"),
                "blocks.*.attention.*.bias": ("heads",),
                "blocks.*.mlp.up.weight": ("ffn", "embed"),
                "blocks.*.mlp.up.bias": ("ffn",),
                "blocks.*.mlp.down.weight": ("embed", "ffn"),
                "blocks.*.mlp.down.bias": ("embed",),
                "blocks.*.*.*": ("embed",),
                "norm.*": ("embed",),
            },
            blocks=["blocks.*"],
            sizes={"heads": self.n_heads},
            branches=["blocks.*.attention", "blocks.*.mlp"],
            attention="blocks.*.attention.inner",
            documents="documents",
            head="head",
            before=["tokens", "places"],
            after=["norm", "head"],
            init={
                "blocks.*.norm*.weight": ones,
                "norm.weight": ones,
                "blocks.*.attention.out.weight": Normal(0.02 / (2 * self.n_layers) ** 0.5),
                "blocks.*.mlp.down.weight": Normal(0.02 / (2 * self.n_layers) ** 0.5),
                "blocks.*.*.*.weight": Normal(0.02),
                "*.weight": Normal(0.02),
                "*.*.*.*.bias": zeros,
                "*.*.*.bias": zeros,
                "*.bias": zeros,
            },
            flops=Flops(multiplied, attention),
        )
