"""Small models for testing strategies; each breaks other assumptions that a strategy might make.

`llama3`: grouped queries and SwiGLU; `tied`: the same with tied embeddings, wider. `odd`: biases, LayerNorm, GELU,
learned positions, tied, other names. `qk_norm`: normed queries and keys. `mla`: multi-head latent attention. `moe`: a
mixture of experts after a dense block, with a shared expert, groups, and both kinds of balance.
"""

from collections.abc import Callable
from typing import Any

VOCAB = 64


def llama3(**changes: Any) -> Any:
    """A tiny one, with these changes."""
    from plait_models.llama3 import Llama3

    tiny = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}
    return Llama3(**{**tiny, "vocab_size": VOCAB, **changes})


def _tied() -> Any:
    return llama3(dim=48, ffn_dim=64, tie_embeddings=True)


def _odd() -> Any:
    from plait_testing.models.odd import Odd

    return Odd(vocab_size=VOCAB)


def qk_norm(**changes: Any) -> Any:
    """A tiny one, with these changes. Heads are wider than dim / n_heads: no strategy may rely on these being equal."""
    from plait_models.qwen3 import Qwen3

    tiny = {"dim": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 64, "max_seq_len": 64}
    return Qwen3(**{**tiny, "vocab_size": VOCAB, **changes})


def _mla() -> Any:
    """All blocks are dense, and heads of values narrower than those of queries and keys."""
    return moe(n_layers=2, n_dense_layers=2, v_head_dim=6, ffn_dim=64)


def moe(**changes: Any) -> Any:
    """A tiny one, with these changes. A step changes its bias so much that the routing changes at once."""
    from plait_models.deepseek_v3 import DeepSeekV3

    tiny = {
        "dim": 32, "n_layers": 3, "n_dense_layers": 1, "n_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "ffn_dim": 48, "expert_ffn_dim": 16,
        "n_experts": 8, "n_shared_experts": 1, "top_k": 2, "n_groups": 4, "top_groups": 2, "route_scale": 2.0,
        "bias_update": 0.05, "balance_loss": 0.01, "max_seq_len": 64, "vocab_size": VOCAB,
    }  # fmt: skip
    return DeepSeekV3(**{**tiny, **changes})


MODELS: dict[str, Callable[[], Any]] = {
    "llama3": llama3,
    "tied": _tied,
    "odd": _odd,
    "qk_norm": qk_norm,
    "mla": _mla,
    "moe": moe,
}


def llama3_of_four() -> Any:
    return llama3(n_layers=4)


def moe_of_four() -> Any:
    return moe(n_layers=4)


# With four blocks: two have a block on both sides, also if layers are divided.
OF_FOUR: dict[str, Callable[[], Any]] = {"llama3": llama3_of_four, "moe": moe_of_four}
