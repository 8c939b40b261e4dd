"""Small models of many families, and how they are compared with one process."""

import contextlib
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait.checkpoint.init_from import check_weights, read_weights
from plait.parallel.state import integers, shapes, tied_names
from plait.testing import Trial, TrialResult, train, worst_gradient
from plait_testing.widened import Widened
from plait_transformers.build import decoder
from plait_transformers.encoders import is_encoder
from plait_transformers.language import text_part
from plait_transformers.source import usual_of

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "sliding_window": 6,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # of recurrences
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "mamba_d_ssm": 64},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_heads": 4, "linear_head_dim": 8},
    # of decoders beside encoders
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    # of what chooses keys, and of rotations of a part of a head
    **{"index_topk": 6, "index_head_dim": 8, "index_n_heads": 2, "rotary_dim": 4},
}
LATENT = {  # where a model has latent attention
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "head_dim": 8},
}
PER_LAYER = {  # layers that differ in the width of heads
    **{"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "per_layer_config": {1: {"head_dim": 16}}}
}
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "dots1": {"n_shared_experts": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_text": {**PER_LAYER, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": PER_LAYER,
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "hidden_size_per_layer_input": 8, "laurel_rank": 4},
        "num_kv_shared_layers": 2,
        **{"intermediate_size": [48] * 4, "vocab_size_per_layer_input": 64, "pad_token_id": None},
    },
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 0.5, "kv_n_heads": 2},  # without the first it cannot be built
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},  # which text does not enter
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}


def built(kind: str, balance_loss: float | None = None, **more: Any) -> Any:
    """The small model of the family `kind` on meta, with the keys `more` over its own."""
    with torch.device("meta"):
        return decoder(config={**keys_of(kind), **more}, balance_loss=balance_loss)


def keys_of(kind: str) -> dict[str, Any]:
    """`model.config` of a small model of the family `kind`."""
    from transformers import CONFIG_MAPPING

    known = usual_of(kind)
    part = None if isinstance(known, type) else text_part(known)
    if part is not None and part.model_type in CONFIG_MAPPING:  # of more inputs than text
        return {"model_type": kind, "text_config": keys_of(part.model_type)}
    sizes = SIZES | LATENT if _takes(known, "kv_lora_rank") else SIZES
    fits = {name: value for name, value in sizes.items() if _takes(known, name)}
    if getattr(known, "is_decoder", None) is False and not is_encoder(known):
        fits["is_decoder"] = True  # its own keys for a decoder of the same layers
        fits |= {"is_encoder_decoder": False} if known.is_encoder_decoder else {}
    return {"model_type": kind, **fits, **_with_all_kinds(kind, fits | MORE.get(kind, {})), **MORE.get(kind, {})}


def _with_all_kinds(kind: str, fits: dict[str, Any]) -> dict[str, Any]:
    """A layer of each kind that the family's usual configuration lists, if the small model would lack some."""
    from transformers import CONFIG_MAPPING

    try:
        usual = CONFIG_MAPPING[kind]()
        small, listed = CONFIG_MAPPING[kind].from_dict(fits), usual.to_dict()
    except Exception:  # a family whose usual sizes do not fit, or these: it is refused, with a sentence
        return {}
    layers = getattr(usual, "num_hidden_layers", 0)
    lists = {name: own for name, own in listed.items() if _kinds(own, layers) and name not in MORE.get(kind, {})}
    if all({*own} <= {*(getattr(small, name, None) or ())} for name, own in lists.items()):
        return {}
    chosen, seen = list[int](), set[tuple[str, Any]]()
    for number in range(layers):
        of_layer = {(name, own[number]) for name, own in lists.items()}
        if not of_layer <= seen:
            chosen.append(number)
            seen |= of_layer
    return {"num_hidden_layers": len(chosen), **{n: [own[number] for number in chosen] for n, own in lists.items()}}


def _kinds(own: Any, layers: int) -> bool:
    """Whether the value of a key names the kind of each layer, of which there are several."""
    return isinstance(own, list | tuple) and len(own) == layers and 1 < len({*map(str, own)}) < layers


def _takes(config: Any, name: str) -> bool:
    own = getattr(type(config), name, None)
    if isinstance(own, property):
        return own.fset is not None
    try:
        return hasattr(config, name)
    except Exception:  # layers differ in it
        return False


@attrs.frozen
class OfFamily(Trial):
    """A trial of a small model of `kind`, in float64 also where it casts to float32 by hand, unless `narrow`."""

    kind: str = "llama"
    balance_loss: float | None = None
    narrow: bool = False

    def build(self) -> nn.Module:
        model: nn.Module = built(self.kind, self.balance_loss)
        return model

    def computing(self) -> Any:
        return contextlib.nullcontext() if self.narrow else Widened()


def result(kind: str, strategies: dict[str, Any], documents: bool = False, chunks: int = 1) -> TrialResult:
    """Called on every rank."""
    return train(OfFamily(kind=kind, steps=2, documents=documents, chunks=chunks), strategies)


def apart(found: TrialResult, wanted: TrialResult) -> tuple[float, str]:
    """The worst gradient and its name; infinite if initial values differ."""
    for name, value in wanted.initial.items():
        if not value.equal(found.initial[name]):
            return float("inf"), f"initial {name}"
    return worst_gradient(found, wanted)


def read(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """(the model of `folder`, on meta; its state as the files have it, NaN or -1 where they have none)."""
    with torch.device("meta"):
        model: Any = decoder(path=str(folder))
    parts, ties, sizes = model.weight_parts(), tied_names(model), shapes(model)
    whole_numbers = integers(model)
    check_weights(folder, sizes, ties, parts, whole_numbers)
    ours = {fqn: torch.full(size, -1 if fqn in whole_numbers else torch.nan) for fqn, size in sizes.items()}
    read_weights(folder, ours, ties, parts=parts)
    return model, ours
