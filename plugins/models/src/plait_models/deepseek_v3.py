"""DeepSeek-V3 (arXiv:2412.19437) and V2 (arXiv:2405.04434): latent attention and a mixture of experts.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from plait import ModelSpec, misfit
from plait_models import mla, moe, swiglu
from plait_models.decoder import ATTENTION, FEED_FORWARD, Block, Decoder
from plait_models.layers import Rope
from plait_models.moe import Experts, MoE, Router
from plait_models.options import boolean, none_below, one_of, positive, positive_int
from plait_models.swiglu import SwiGLU

if TYPE_CHECKING:
    from plait.ops import HuggingFace


class DeepSeekV3(Decoder):
    """Tokens (B, T) to logits (B, T, V). The published module that predicts a second token (MTP) is not included.

    dim:              width of the residual stream.
    n_layers:         number of blocks.
    n_dense_layers:   how many blocks, from the first, have a dense feed-forward instead of experts.
    n_heads:          attention heads.
    q_lora_rank:      width of the queries' latent; None: queries come straight from the stream.
    kv_lora_rank:     width of the latent of keys and values.
    qk_nope_head_dim: elements of a query or key head that RoPE does not rotate.
    qk_rope_head_dim: elements that it rotates; even.
    v_head_dim:       width of a value head.
    ffn_dim:          inner width of a dense feed-forward.
    expert_ffn_dim:   inner width of an expert.
    n_experts:        routed experts of a block.
    n_shared_experts: experts that every token visits, as one feed-forward with this many times the width.
    top_k:            routed experts that a token visits.
    n_groups, top_groups: number of groups of experts, and how many of them, the best, a token may visit.
    group_top:        how many of its best experts' scores add up to a group's score: 2 in V3, 1 in V2.
    score:            "sigmoid" (V3) or "softmax" (V2) of the router's logits.
    norm_weights:     whether the weights of a token's experts are divided by their sum.
    route_scale:      factor of these weights.
    bias_update:      how much a step changes the routers' biases towards balance; 0: not at all.
    balance_loss:     factor of the sequence-wise balance loss; 0: none.
    vocab_size:       number of tokens that exist.
    max_seq_len:      the model's context in tokens; longer input is refused.
    rope_theta:       base of RoPE's wavelengths.
    norm_eps:         added to the mean square in RMSNorm.
    rope_scaling:     options of `Yarn`, or None.

    RoPE pairs an element of a head's first half with the one at the same place in the second; in the published weights
    neighbours are pairs. So a converter permutes the rows that RoPE rotates, the last `qk_rope_head_dim` of every head
    of `wq` (or `wq_b`) and of `wkv_a`: first those with even numbers, then those with odd ones. Raises PlaitError,
    naming `model.<key>`, for options that do not fit.
    """

    def __init__(
        self,
        *,
        dim: int,
        n_layers: int,
        n_dense_layers: int,
        n_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        ffn_dim: int,
        expert_ffn_dim: int,
        n_experts: int,
        n_shared_experts: int,
        top_k: int,
        vocab_size: int,
        max_seq_len: int,
        n_groups: int = 1,
        top_groups: int = 1,
        group_top: int = 2,
        score: str = "sigmoid",
        norm_weights: bool = True,
        route_scale: float = 1.0,
        bias_update: float = 0.001,
        balance_loss: float = 0.0,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-6,
        rope_scaling: Mapping[str, float] | None = None,
    ) -> None:
        positive_int(dim=dim, n_layers=n_layers, n_heads=n_heads, kv_lora_rank=kv_lora_rank, v_head_dim=v_head_dim)
        positive_int(qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim, ffn_dim=ffn_dim)
        positive_int(expert_ffn_dim=expert_ffn_dim, vocab_size=vocab_size, max_seq_len=max_seq_len)
        if q_lora_rank is not None:
            positive_int(q_lora_rank=q_lora_rank)
        if qk_rope_head_dim % 2:
            raise misfit("model.qk_rope_head_dim", qk_rope_head_dim, "even: RoPE rotates pairs")
        boolean(norm_weights=norm_weights)
        positive(rope_theta=rope_theta, norm_eps=norm_eps)
        none_below(0, n_dense_layers=n_dense_layers, n_shared_experts=n_shared_experts)
        moe.check(n_experts, top_k, n_groups, top_groups, group_top)
        one_of("score", score, ("sigmoid", "softmax"))
        positive(route_scale=route_scale)
        none_below(0.0, bias_update=bias_update, balance_loss=balance_loss)
        yarn = mla.Yarn.of(rope_scaling, rope_theta) if rope_scaling else None

        def mixture() -> MoE:
            router = Router(
                n_experts, dim, top_k, score=score, n_groups=n_groups, top_groups=top_groups, group_top=group_top,
                norm_weights=norm_weights, scale=route_scale, bias_update=bias_update, balance_loss=balance_loss,
            )  # fmt: skip
            shared = SwiGLU(dim, n_shared_experts * expert_ffn_dim) if n_shared_experts else None
            return MoE(router, Experts(n_experts, dim, expert_ffn_dim), shared)

        def block(layer: int) -> Block:
            attention = mla.LatentAttention(
                dim, n_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, norm_eps,
                yarn.sharpness() if yarn else (1.0, 1.0),
            )  # fmt: skip
            return Block(dim, norm_eps, attention, SwiGLU(dim, ffn_dim) if layer < n_dense_layers else mixture())

        super().__init__(
            (block(layer) for layer in range(n_layers)),
            Rope(qk_rope_head_dim, rope_theta, yarn),
            dim=dim,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            norm_eps=norm_eps,
        )
        self.n_dense_layers, self.n_heads = min(n_dense_layers, n_layers), n_heads
        self.low_rank_queries, self.n_shared_experts = q_lora_rank is not None, n_shared_experts
        self.head_dim, self.v_head_dim = qk_nope_head_dim + qk_rope_head_dim, v_head_dim
        self.unvisited = (n_layers - self.n_dense_layers) * (n_experts - top_k) * 3 * dim * expert_ffn_dim

    def spec(self) -> ModelSpec:
        """What strategies may know about the model. Called on the whole model, before anything divides it."""
        normals = self.normals()
        axes, init = mla.axes(ATTENTION, self.low_rank_queries), mla.init(ATTENTION, *normals)
        mixed = self.n_dense_layers < self.n_layers
        if mixed:
            axes |= moe.axes(FEED_FORWARD)
            init |= moe.init(FEED_FORWARD, *normals)
        shared = mixed and self.n_shared_experts > 0
        for fqn in [FEED_FORWARD] * (self.n_dense_layers > 0) + [f"{FEED_FORWARD}.shared"] * shared:
            axes |= swiglu.axes(fqn)
            init |= swiglu.init(fqn, *normals)
        return self.spec_of(
            axes=axes,
            init=init,
            sizes={"heads": self.n_heads},
            scored=self.n_layers * self.n_heads * (self.head_dim + self.v_head_dim),
            unvisited=self.unvisited,
            routers=(f"{FEED_FORWARD}.router",) if mixed else (),
        )

    def hugging_face(self) -> "HuggingFace":
        """The model's table for Hugging Face's libraries: deepseek_v3, or with softmax deepseek_v2."""
        from plait_models.hugging_face.deepseek import table

        return table(self)
