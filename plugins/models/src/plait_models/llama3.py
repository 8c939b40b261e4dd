"""Llama 3 (arXiv:2407.21783) and its updates 3.1 and 3.2, with Meta's parameter names.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait import ModelSpec, PlaitError
from plait_models import gqa, swiglu
from plait_models.decoder import ATTENTION, FEED_FORWARD, Block, Decoder
from plait_models.gqa import GroupedQueryAttention
from plait_models.layers import Rope, RopeScaling
from plait_models.options import boolean, divides, positive, positive_int
from plait_models.swiglu import SwiGLU

if TYPE_CHECKING:
    from plait.ops import HuggingFace


class Llama3(Decoder):
    """Tokens (B, T) to logits (B, T, V).

    dim:            width of the residual stream.
    n_layers:       number of blocks.
    n_heads:        query heads; they divide `dim` into heads of even width.
    n_kv_heads:     key and value heads; they divide `n_heads`.
    ffn_dim:        inner width of the feed-forward.
    vocab_size:     number of tokens that exist.
    max_seq_len:    the model's context in tokens; longer input is refused.
    rope_theta:     base of RoPE's wavelengths.
    norm_eps:       added to the mean square in RMSNorm.
    tie_embeddings: whether the head shares the embedding's weight.
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
        positive_int(dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_dim=ffn_dim)
        positive_int(vocab_size=vocab_size, max_seq_len=max_seq_len)
        boolean(tie_embeddings=tie_embeddings)
        positive(rope_theta=rope_theta, norm_eps=norm_eps)
        divides("n_heads", n_heads, "dim", dim)
        divides("n_kv_heads", n_kv_heads, "n_heads", n_heads)
        head_dim = dim // n_heads
        if head_dim % 2:
            raise PlaitError(
                f"model.dim = {dim} over model.n_heads = {n_heads} makes heads of width {head_dim}; it must be even"
            ).at("model.n_heads", n_heads, fits="heads of an even width")
        scaling = RopeScaling.of(rope_scaling) if rope_scaling else None

        def block() -> Block:
            attention = GroupedQueryAttention(dim, n_heads, n_kv_heads, head_dim)
            return Block(dim, norm_eps, attention, SwiGLU(dim, ffn_dim))

        super().__init__(
            (block() for _ in range(n_layers)),
            Rope(head_dim, rope_theta, scaling),
            dim=dim,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            norm_eps=norm_eps,
            tie_embeddings=tie_embeddings,
        )
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim

    def spec(self) -> ModelSpec:
        """What strategies may know about the model. Called on the whole model, before anything divides it."""
        normals = self.normals()
        return self.spec_of(
            axes={**gqa.axes(ATTENTION), **swiglu.axes(FEED_FORWARD)},
            init={**gqa.init(ATTENTION, *normals), **swiglu.init(FEED_FORWARD, *normals)},
            sizes={"heads": self.n_heads, "kv_heads": self.n_kv_heads},
            scored=self.n_layers * self.n_heads * 2 * self.head_dim,
        )

    def hugging_face(self) -> "HuggingFace":
        """The model's table for Hugging Face's libraries."""
        from plait.ops import HuggingFace
        from plait_models.hugging_face import common

        first: Any = self.layers["0"]
        rope: Any = self.rope
        scaling = None
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
