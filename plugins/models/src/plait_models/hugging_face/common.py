"""Rules that the tables of several models share, and config.json entries that all have."""

from typing import Any

from plait.ops import Rule

OURS, THEIRS = "layers.*", "model.layers.*"
AROUND = (
    Rule("tok_embeddings.weight", "model.embed_tokens.weight"),
    Rule(f"{OURS}.attention_norm.weight", f"{THEIRS}.input_layernorm.weight"),
    Rule(f"{OURS}.ffn_norm.weight", f"{THEIRS}.post_attention_layernorm.weight"),
    Rule("norm.weight", "model.norm.weight"),
    Rule("output.weight", "lm_head.weight"),
)
ATTENTION = tuple(Rule(f"{OURS}.attention.w{x}.weight", f"{THEIRS}.self_attn.{x}_proj.weight") for x in "qkvo")
LINEARS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
DENSE = tuple(Rule(f"{OURS}.feed_forward.{w}.weight", f"{THEIRS}.mlp.{x}.weight") for w, x in LINEARS.items())
EXPERTS = (
    Rule(f"{OURS}.feed_forward.router.weight", f"{THEIRS}.mlp.gate.weight"),
    *(Rule(f"{OURS}.feed_forward.experts.{w}", f"{THEIRS}.mlp.experts.*.{x}.weight") for w, x in LINEARS.items()),
)
UNBIASED = (  # a router that there chooses by its scores alone
    Rule(f"{OURS}.feed_forward.router.bias", None, needed=True),
    Rule(f"{OURS}.feed_forward.router.counts", None),
)
SKIPPED = (f"{THEIRS}.self_attn.rotary_emb.inv_freq",)  # in old files; it follows from the options


def yarn(scaling: Any) -> dict[str, Any]:
    """`rope_scaling` for a `Yarn`, without its sharpening."""
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }


def config_of_decoder(model: Any, kind: str, architecture: str) -> dict[str, Any]:
    """The entries of config.json for every model here: sizes of its modules, and features that it never uses."""
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": model.tok_embeddings.num_embeddings,
        "hidden_size": model.tok_embeddings.embedding_dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.output.weight is model.tok_embeddings.weight,
        "hidden_act": "silu",
        "attention_bias": False,
    }
