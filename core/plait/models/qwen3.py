"""Qwen3 (arXiv:2505.09388), dense or with a mixture of experts in every block, named as Llama 3's parameters are.

Shapes: B batch, T tokens, V vocabulary, D model width, H query heads, K key and value heads, E width of a head,
X experts, F their inner width.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from plait.errors import PlaitError
from plait.models import moe
from plait.models.flops import Flops
from plait.models.init import Normal, ones
from plait.models.layers import Block, CausalAttention, Rope, SwiGLU
from plait.models.mla import Yarn
from plait.models.moe import Experts, MoE, Router
from plait.models.options import divides, none_below, positive, positive_int
from plait.spec import ModelSpec

if TYPE_CHECKING:
    from plait.models.convert import HuggingFace


class Attention(nn.Module):
    """Grouped-query attention whose queries and keys are normed head by head before RoPE."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        norm_eps: float,
        theta: float,
        yarn: Yarn | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, norm_eps)
        self.rope = Rope(head_dim, theta, yarn)
        self.sharpness = yarn.sharpness()[0] if yarn else 1.0  # RoPE turns all of a head
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        q_BTHE = self.q_norm(self.wq(x_BTD).unflatten(-1, (-1, self.head_dim)))
        k_BTKE = self.k_norm(self.wk(x_BTD).unflatten(-1, (-1, self.head_dim)))
        v_BTKE = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTHE, k_BTKE = self.rope(q_BTHE, k_BTKE, positions_BT)
        if self.sharpness != 1.0:
            q_BTHE = q_BTHE * self.sharpness
        out_BHTE = self.inner(q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), positions_BT)
        return self.wo(out_BHTE.transpose(1, 2).flatten(-2))


class Qwen3(nn.Module):
    """Tokens (B, T) to logits (B, T, V).

    dim:            width of the residual stream.
    n_layers:       number of blocks.
    n_heads:        query heads.
    n_kv_heads:     key and value heads; they divide `n_heads`.
    head_dim:       width of a head, which need not be dim / n_heads; even.
    ffn_dim:        inner width of the feed-forward, or of each expert.
    vocab_size:     number of tokens that exist.
    max_seq_len:    tokens of context that the model is meant for; longer input is refused.
    rope_theta:     base of RoPE's wavelengths.
    norm_eps:       added to the mean square in RMSNorm.
    tie_embeddings: whether the head's weight is the embedding's.
    rope_scaling:   options of `Yarn`, or None.
    n_experts:      experts of a block; 0: the feed-forward is dense, and what follows has no effect.
    top_k:          experts that a token visits.
    norm_weights:   whether the weights of a token's experts are divided by their sum.
    bias_update:    how far a step moves the routers' biases towards balance; 0: they stay at 0, as Qwen3's do.
    balance_loss:   factor of the sequence-wise balance loss; 0: there is none.

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
        super().__init__()
        positive_int(dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
        positive_int(ffn_dim=ffn_dim, vocab_size=vocab_size, max_seq_len=max_seq_len)
        positive(rope_theta=rope_theta, norm_eps=norm_eps)
        divides("n_kv_heads", n_kv_heads, "n_heads", n_heads)
        if head_dim % 2:
            raise PlaitError(f"model.head_dim is {head_dim}; it must be even: RoPE turns pairs")
        none_below(0, n_experts=n_experts)
        if n_experts:
            moe.check(n_experts, top_k)
            none_below(0.0, bias_update=bias_update, balance_loss=balance_loss)
        self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim = n_layers, n_heads, n_kv_heads, head_dim
        self.ffn_dim, self.n_experts, self.top_k, self.norm_weights = ffn_dim, n_experts, top_k, norm_weights
        self.max_seq_len, self.tie_embeddings = max_seq_len, tie_embeddings
        yarn = Yarn.of(rope_scaling, rope_theta) if rope_scaling else None

        def feed_forward() -> nn.Module:
            if not n_experts:
                return SwiGLU(dim, ffn_dim)
            router = Router(
                n_experts, dim, top_k, norm_weights=norm_weights, bias_update=bias_update, balance_loss=balance_loss
            )
            return MoE(router, Experts(n_experts, dim, ffn_dim))

        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict()  # not a list: a pipeline's stage takes blocks out, and names stay
        for layer in range(n_layers):
            attention = Attention(dim, n_heads, n_kv_heads, head_dim, norm_eps, rope_theta, yarn)
            self.layers[str(layer)] = Block(dim, norm_eps, attention, feed_forward())
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
        std = 0.02  # the scheme of llama3.py
        onto_stream = Normal(std / (2 * self.n_layers) ** 0.5)
        embedding = 0 if self.tie_embeddings else self.tok_embeddings.weight.numel()
        ffn = "layers.*.feed_forward"
        unvisited = 0
        if self.n_experts:
            expert = 3 * self.ffn_dim * self.norm.weight.numel()
            unvisited = self.n_layers * (self.n_experts - self.top_k) * expert
            axes, init = moe.axes(ffn), moe.init(ffn, Normal(std), onto_stream)
        else:
            axes = {f"{ffn}.w2.weight": ("embed", "ffn"), f"{ffn}.w*.weight": ("ffn", "embed")}
            init = {f"{ffn}.w2.weight": onto_stream, f"{ffn}.w*.weight": Normal(std)}
        return ModelSpec(
            axes={
                "tok_embeddings.weight": ("vocab", "embed"),
                "layers.*.attention.wq.weight": ("heads", "embed"),
                "layers.*.attention.wk.weight": ("kv_heads", "embed"),
                "layers.*.attention.wv.weight": ("kv_heads", "embed"),
                "layers.*.attention.wo.weight": ("embed", "heads"),
                "layers.*.attention.q_norm.weight": (None,),
                "layers.*.attention.k_norm.weight": (None,),
                **axes,
                "layers.*.attention_norm.weight": ("embed",),
                "layers.*.ffn_norm.weight": ("embed",),
                "norm.weight": ("embed",),
                "output.weight": ("vocab", "embed"),
            },
            blocks=("layers.*",),
            sizes={"heads": self.n_heads, "kv_heads": self.n_kv_heads},
            branches=("layers.*.attention", ffn),
            routers=(f"{ffn}.router",) if self.n_experts else (),
            attention="layers.*.attention.inner",
            init={
                "tok_embeddings.weight": Normal(std if self.tie_embeddings else 1.0),
                "layers.*.attention.wo.weight": onto_stream,
                "layers.*.attention.w*.weight": Normal(std),
                "layers.*.attention.*_norm.weight": ones,
                **init,
                "layers.*.attention_norm.weight": ones,
                "layers.*.ffn_norm.weight": ones,
                "norm.weight": ones,
                "output.weight": Normal(std),
            },
            flops=Flops(
                parameters=sum(p.numel() for p in self.parameters()) - embedding - unvisited,
                attention=self.n_layers * self.n_heads * 2 * self.head_dim,
            ),
        )

    def hugging_face(self) -> "HuggingFace":
        """The model as Hugging Face's libraries have it."""
        from plait.models.convert import HuggingFace, Rule, common

        kind, architecture = ("qwen3_moe", "Qwen3MoeForCausalLM") if self.n_experts else ("qwen3", "Qwen3ForCausalLM")
        first: Any = self.layers["0"]
        rope = first.attention.rope
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
