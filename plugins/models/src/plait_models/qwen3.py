"""Qwen3 (arXiv:2505.09388), dense or with a mixture of experts in every block, with Llama 3's parameter names.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from plait import ModelSpec, misfit
from plait_models import gqa, moe, swiglu
from plait_models.decoder import ATTENTION, FEED_FORWARD, Block, Decoder
from plait_models.gqa import GroupedQueryAttention
from plait_models.layers import Rope
from plait_models.mla import Yarn
from plait_models.moe import Experts, MoE, Router
from plait_models.options import boolean, divides, none_below, positive, positive_int
from plait_models.swiglu import SwiGLU

if TYPE_CHECKING:
    from plait.ops import HuggingFace


class Qwen3(Decoder):
    """Tokens (B, T) to logits (B, T, V).

    dim:            width of the residual stream.
    n_layers:       number of blocks.
    n_heads:        query heads.
    n_kv_heads:     key and value heads; they divide `n_heads`.
    head_dim:       width of a head, which need not be dim / n_heads; even.
    ffn_dim:        inner width of the feed-forward, or of each expert.
    vocab_size:     number of tokens that exist.
    max_seq_len:    the model's context in tokens; longer input is refused.
    rope_theta:     base of RoPE's wavelengths.
    norm_eps:       added to the mean square in RMSNorm.
    tie_embeddings: whether the head shares the embedding's weight.
    rope_scaling:   options of `Yarn`, or None.
    n_experts:      experts of a block; 0: the feed-forward is dense, and the options below have no effect.
    top_k:          experts that a token visits.
    norm_weights:   whether the weights of a token's experts are divided by their sum.
    bias_update:    how much a step changes the routers' biases towards balance; 0: not at all, as in Qwen3.
    balance_loss:   factor of the sequence-wise balance loss; 0: none.

    Raises PlaitError, naming `model.<key>`, for options that do not fit.
    """

    def __init__(
        self,
        *,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        ffn_dim: int,
        vocab_size: int,
        max_seq_len: int,
        rope_theta: float = 1_000_000.0,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = False,
        rope_scaling: Mapping[str, float] | None = None,
        n_experts: int = 0,
        top_k: int = 8,
        norm_weights: bool = True,
        bias_update: float = 0.0,
        balance_loss: float = 0.0,
    ) -> None:
        positive_int(dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
        positive_int(ffn_dim=ffn_dim, vocab_size=vocab_size, max_seq_len=max_seq_len)
        boolean(tie_embeddings=tie_embeddings, norm_weights=norm_weights)
        positive(rope_theta=rope_theta, norm_eps=norm_eps)
        divides("n_kv_heads", n_kv_heads, "n_heads", n_heads)
        if head_dim % 2:
            raise misfit("model.head_dim", head_dim, "even: RoPE rotates pairs")
        none_below(0, n_experts=n_experts)
        if n_experts:
            moe.check(n_experts, top_k)
            none_below(0.0, bias_update=bias_update, balance_loss=balance_loss)
        yarn = Yarn.of(rope_scaling, rope_theta) if rope_scaling else None
        sharpness = yarn.sharpness()[0] if yarn else 1.0  # RoPE rotates the whole head

        def feed_forward() -> nn.Module:
            if not n_experts:
                return SwiGLU(dim, ffn_dim)
            router = Router(
                n_experts, dim, top_k, norm_weights=norm_weights, bias_update=bias_update, balance_loss=balance_loss
            )
            return MoE(router, Experts(n_experts, dim, ffn_dim))

        def block() -> Block:
            attention = GroupedQueryAttention(dim, n_heads, n_kv_heads, head_dim, norm_eps, sharpness)
            return Block(dim, norm_eps, attention, feed_forward())

        super().__init__(
            (block() for _ in range(n_layers)),
            Rope(head_dim, rope_theta, yarn),
            dim=dim,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            norm_eps=norm_eps,
            tie_embeddings=tie_embeddings,
        )
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.ffn_dim, self.n_experts, self.top_k, self.norm_weights = ffn_dim, n_experts, top_k, norm_weights

    def spec(self) -> ModelSpec:
        """What strategies may know about the model. Called on the whole model, before anything divides it."""
        normals = self.normals()
        branch = moe if self.n_experts else swiglu
        unvisited = (self.n_experts - self.top_k) * 3 * self.ffn_dim * self.norm.weight.numel()
        return self.spec_of(
            axes={**gqa.axes(ATTENTION, normed=True), **branch.axes(FEED_FORWARD)},
            init={**gqa.init(ATTENTION, *normals, normed=True), **branch.init(FEED_FORWARD, *normals)},
            sizes={"heads": self.n_heads, "kv_heads": self.n_kv_heads},
            scored=self.n_layers * self.n_heads * 2 * self.head_dim,
            unvisited=self.n_layers * unvisited if self.n_experts else 0,
            routers=(f"{FEED_FORWARD}.router",) if self.n_experts else (),
        )

    def hugging_face(self) -> "HuggingFace":
        """The model's table for Hugging Face's libraries."""
        from plait.ops import HuggingFace, Rule
        from plait_models.hugging_face import common

        kind, architecture = ("qwen3_moe", "Qwen3MoeForCausalLM") if self.n_experts else ("qwen3", "Qwen3ForCausalLM")
        rope: Any = self.rope
        config = {
            **common.config_of_decoder(self, kind, architecture),
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": rope.theta,
            "rope_scaling": None,
            "use_sliding_window": False,
        }
        if rope.scaling is not None:
            sharpness = rope.scaling.sharpness()[0]  # of queries times keys
            config["rope_scaling"] = {**common.yarn(rope.scaling), "attention_factor": sharpness**0.5}
        if not self.n_experts:
            feed_forward = common.DENSE
            config |= {"intermediate_size": self.ffn_dim}
        else:
            feed_forward = (*common.EXPERTS, *common.UNBIASED)
            config |= {
                "moe_intermediate_size": self.ffn_dim,
                "num_experts": self.n_experts,
                "num_experts_per_tok": self.top_k,
                "norm_topk_prob": self.norm_weights,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        norms = [Rule(f"layers.*.attention.{x}_norm.weight", f"model.layers.*.self_attn.{x}_norm.weight") for x in "qk"]
        return HuggingFace((*common.AROUND, *common.ATTENTION, *norms, *feed_forward), config, common.SKIPPED)
