"""Llama 3 (arXiv:2407.21783) and its updates 3.1 and 3.2, with Meta's names of parameters.

Shapes: B batch, T tokens, V vocabulary, D model width, H query heads, K key and value heads, E width of a head.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from plait.errors import PlaitError
from plait.models.flops import Flops
from plait.models.init import Normal, ones
from plait.models.layers import CausalAttention, Rope, RopeScaling, SwiGLU
from plait.models.options import divides, positive, positive_int
from plait.spec import ModelSpec

if TYPE_CHECKING:
    from plait.models.convert import HuggingFace


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with RoPE."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, rope: Rope) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.rope = rope
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        q_BTHE = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))  # a rank may hold fewer heads than the model has
        k_BTKE = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKE = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTHE, k_BTKE = self.rope(q_BTHE, k_BTKE, positions_BT)
        out_BHTE = self.inner(q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), positions_BT)
        return self.wo(out_BHTE.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, ffn_dim: int, norm_eps: float, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, norm_eps)
        self.feed_forward = SwiGLU(dim, ffn_dim)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions_BT)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Llama3(nn.Module):
    """Tokens (B, T) to logits (B, T, V).

    dim:            width of the residual stream.
    n_layers:       number of blocks.
    n_heads:        query heads; they divide `dim` into heads of even width.
    n_kv_heads:     key and value heads; they divide `n_heads`.
    ffn_dim:        inner width of the feed-forward.
    vocab_size:     number of tokens that exist.
    max_seq_len:    tokens of context that the model is meant for; longer input is refused.
    rope_theta:     base of RoPE's wavelengths.
    norm_eps:       added to the mean square in RMSNorm.
    tie_embeddings: whether the head's weight is the embedding's.
    rope_scaling:   options of `RopeScaling`, or None.

    Raises PlaitError, naming `model.<key>`, for options that do not fit.
    """

    def __init__(
        self,
        *,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        ffn_dim: int,
        vocab_size: int,
        max_seq_len: int,
        rope_theta: float = 500_000.0,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
        rope_scaling: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        positive_int(dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_dim=ffn_dim)
        positive_int(vocab_size=vocab_size, max_seq_len=max_seq_len)
        positive(rope_theta=rope_theta, norm_eps=norm_eps)
        divides("n_heads", n_heads, "dim", dim)
        divides("n_kv_heads", n_kv_heads, "n_heads", n_heads)
        head_dim = dim // n_heads
        if head_dim % 2:
            raise PlaitError(
                f"model.dim = {dim} over model.n_heads = {n_heads} makes heads of width {head_dim}; it must be even"
            )
        self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim = n_layers, n_heads, n_kv_heads, head_dim
        self.max_seq_len = max_seq_len
        self.tie_embeddings = tie_embeddings
        scaling = RopeScaling.of(rope_scaling) if rope_scaling else None

        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict()  # not a list: a pipeline's stage takes blocks out, and names stay
        for layer in range(n_layers):
            attention = Attention(dim, n_heads, n_kv_heads, Rope(head_dim, rope_theta, scaling))
            self.layers[str(layer)] = Block(dim, ffn_dim, norm_eps, attention)
        self.norm = nn.RMSNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V). `positions_BT` restart at 0 where a packed document starts; None: one document a row."""
        if tokens_BT.shape[1] > self.max_seq_len:
            raise PlaitError(f"a sequence has {tokens_BT.shape[1]} tokens, but model.max_seq_len is {self.max_seq_len}")
        x_BTD = self.tok_embeddings(tokens_BT)
        for block in self.layers.values():
            x_BTD = block(x_BTD, positions_BT)
        return self.output(self.norm(x_BTD))

    def spec(self) -> ModelSpec:
        """What strategies may know of the model. Asked of the whole model, before anything takes it apart."""
        # GPT-2's scheme (Radford et al. 2019, section 2.3, and its code): one std, smaller where 2 summands a block
        # join the stream. An embedding of its own starts at 1, as in torchtitan: it trains faster than 0.02.
        std = 0.02
        onto_stream = Normal(std / (2 * self.n_layers) ** 0.5)
        embedding = 0 if self.tie_embeddings else self.tok_embeddings.weight.numel()
        return ModelSpec(
            axes={
                "tok_embeddings.weight": ("vocab", "embed"),
                "layers.*.attention.wq.weight": ("heads", "embed"),
                "layers.*.attention.wk.weight": ("kv_heads", "embed"),
                "layers.*.attention.wv.weight": ("kv_heads", "embed"),
                "layers.*.attention.wo.weight": ("embed", "heads"),
                "layers.*.feed_forward.w1.weight": ("ffn", "embed"),
                "layers.*.feed_forward.w2.weight": ("embed", "ffn"),
                "layers.*.feed_forward.w3.weight": ("ffn", "embed"),
                "layers.*.attention_norm.weight": ("embed",),
                "layers.*.ffn_norm.weight": ("embed",),
                "norm.weight": ("embed",),
                "output.weight": ("vocab", "embed"),
            },
            blocks=("layers.*",),
            sizes={"heads": self.n_heads, "kv_heads": self.n_kv_heads},
            branches=("layers.*.attention", "layers.*.feed_forward"),
            attention="layers.*.attention.inner",
            init={
                "tok_embeddings.weight": Normal(std if self.tie_embeddings else 1.0),
                "layers.*.attention.wo.weight": onto_stream,
                "layers.*.feed_forward.w2.weight": onto_stream,
                "layers.*.attention.w*.weight": Normal(std),
                "layers.*.feed_forward.w*.weight": Normal(std),
                "layers.*.attention_norm.weight": ones,
                "layers.*.ffn_norm.weight": ones,
                "norm.weight": ones,
                "output.weight": Normal(std),
            },
            flops=Flops(
                parameters=sum(p.numel() for p in self.parameters()) - embedding,
                attention=self.n_layers * self.n_heads * 2 * self.head_dim,
            ),
        )

    def hugging_face(self) -> "HuggingFace":
        """The model as Hugging Face's libraries have it."""
        from plait.models.convert import HuggingFace, common

        first: Any = self.layers["0"]
        rope, scaling = first.attention.rope, None
        if rope.scaling is not None:
            scaling = {
                "rope_type": "llama3",
                "factor": rope.scaling.factor,
                "low_freq_factor": rope.scaling.low_freq_factor,
                "high_freq_factor": rope.scaling.high_freq_factor,
                "original_max_position_embeddings": rope.scaling.original_max_seq_len,
            }
        config = {
            **common.config_of_decoder(self, "llama", "LlamaForCausalLM"),
            "intermediate_size": first.feed_forward.w1.out_features,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": rope.theta,
            "rope_scaling": scaling,
            "mlp_bias": False,
        }
        return HuggingFace((*common.AROUND, *common.ATTENTION, *common.DENSE), config, common.SKIPPED)
