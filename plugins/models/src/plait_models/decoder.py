"""What these decoders share: blocks of two branches between an embedding and a head, and their spec.

Shapes: B batch, T tokens, V vocabulary, D model width.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from plait import ModelSpec, PlaitError
from plait.ops import DocumentMask, Flops, Normal, ones
from plait_models.layers import Rope, Turns

ATTENTION, FEED_FORWARD = "layers.*.attention", "layers.*.feed_forward"  # the two branches
STD = 0.02


class Block(nn.Module):
    """Two branches, each after its norm, whose results are added to the stream."""

    def __init__(self, dim: int, norm_eps: float, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x_BTD: Tensor, documents: Tensor | None, turns: Turns) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), documents, turns)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Decoder(nn.Module):
    """Tokens (B, T) to logits (B, T, V)."""

    def __init__(
        self,
        blocks: Iterable[Block],
        rope: Rope,
        *,
        dim: int,
        vocab_size: int,
        max_seq_len: int,
        norm_eps: float,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.rope = rope
        self.documents = DocumentMask()
        # not a list: stages remove blocks, and names stay
        self.layers = nn.ModuleDict({str(layer): block for layer, block in enumerate(blocks)})
        self.n_layers = len(self.layers)
        self.norm = nn.RMSNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.tie_embeddings = tie_embeddings
        if tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V). `positions_BT` restart at 0 at the start of a packed document; None: one document per
        row."""
        if tokens_BT.shape[1] > self.max_seq_len:
            raise PlaitError(
                f"a sequence has {tokens_BT.shape[1]} tokens, but model.max_seq_len is {self.max_seq_len}"
            ).at("model.max_seq_len", self.max_seq_len, fits=f"at least {tokens_BT.shape[1]}")
        x_BTD = self.tok_embeddings(tokens_BT)
        turns = self.rope(tokens_BT, positions_BT, x_BTD.dtype)
        documents = None if positions_BT is None else self.documents(positions_BT, x_BTD.dtype)
        for block in self.layers.values():
            x_BTD = block(x_BTD, documents, turns)
        return self.output(self.norm(x_BTD))

    def normals(self) -> tuple[Normal, Normal]:
        """How matrices are initialised: those within a branch, and those that end one.

        GPT-2's scheme (Radford et al. 2019, section 2.3, and its code): one std, smaller for the projections that join
        the stream, of which a block has 2.
        """
        return Normal(STD), Normal(STD / (2 * self.n_layers) ** 0.5)

    def spec_of(
        self,
        *,
        axes: Mapping[str, tuple[str | None, ...]],
        init: Mapping[str, Callable[..., Any]],
        sizes: Mapping[str, int],
        scored: int,
        unvisited: int = 0,
        routers: tuple[str, ...] = (),
    ) -> ModelSpec:
        """The model's spec, from that of its branches.

        axes, init: of the branches' tensors. scored: elements of a query and a value, over all heads of all blocks.
        unvisited: parameters of experts that a token does not visit.
        """
        embedding = 0 if self.tie_embeddings else self.tok_embeddings.weight.numel()
        return ModelSpec(
            axes={
                "tok_embeddings.weight": ("vocab", "embed"),
                **axes,
                "layers.*.attention_norm.weight": ("embed",),
                "layers.*.ffn_norm.weight": ("embed",),
                "norm.weight": ("embed",),
                "output.weight": ("vocab", "embed"),
            },
            blocks=("layers.*",),
            sizes=sizes,
            branches=(ATTENTION, FEED_FORWARD),
            attention=f"{ATTENTION}.inner",
            documents="documents",
            init={
                # an embedding of its own starts at 1, as in torchtitan: it trains faster than 0.02
                "tok_embeddings.weight": Normal(STD if self.tie_embeddings else 1.0),
                **init,
                "layers.*.attention_norm.weight": ones,
                "layers.*.ffn_norm.weight": ones,
                "norm.weight": ones,
                "output.weight": Normal(STD),
            },
            flops=Flops(parameters=sum(p.numel() for p in self.parameters()) - embedding - unvisited, attention=scored),
            routers=routers,
            row_means=tuple(f"{router}.row_mean" for router in routers),
            head="output",
            before=("tok_embeddings",),
            after=("norm", "output"),
        )
