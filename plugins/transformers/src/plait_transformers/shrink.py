"""A small configuration of the same family: the same kinds of layers and heads, fewer and narrower."""

import re
from typing import Any

from torch import nn

from plait import PlaitError

VOCAB, HEADS, EXPERTS, WINDOW = 64, 4, 4, 5
KEYS = "num_key_value_heads"
KEY_HEADS = (KEYS, "num_kv_heads", "kv_n_heads")  # names of that number
SHARED = "num_kv_shared_layers"  # of the last layers, which attend to keys and values of earlier ones
OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # keys for their number
VISITED = ("num_experts_per_tok", "moe_topk", "moe_top_k")  # keys for the number of experts that a token visits
# What acts only on inputs longer than it: shortened, so that the few tokens of an experiment see it act.
REACH = re.compile(r"(window|chunk|block)_size|local_attention|(sliding|attention)_window|floor_scale|index_topk")


def check_blocks(config: Any) -> None:
    """Raises PlaitError if the number of blocks is not a key of the configuration."""
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise PlaitError(
            f"model=transformers cannot train {config.model_type}: its configuration has no num_hidden_layers, the "
            "number of blocks"
        )


def shrunken(config: Any, model: nn.Module) -> Any:
    """A configuration like `config` with 4 heads of the same width, a vocabulary of 64, and the fewest layers, at least
    2, that have every kind of layer. model: its model, on any device."""
    said = config.to_dict()
    alias = getattr(config, "attribute_map", {})
    layers, heads = config.num_hidden_layers, getattr(config, "num_attention_heads", None) or HEADS
    groups = next((n for name in KEY_HEADS if (n := _of_most(config, said, name))), heads)
    width = _of_most(config, said, "head_dim") or max(1, config.hidden_size // heads)
    numbers = _layers_with_all_kinds(said, layers, model)
    kept = len(numbers)
    hidden = width * (HEADS if config.hidden_size == heads * width else HEADS + 2)
    wanted: dict[str, Any] = {
        "num_hidden_layers": kept,
        **dict.fromkeys(("vocab_size", "decoder_vocab_size"), VOCAB),
        "decoder_layers": kept,
        **dict.fromkeys(("num_attention_heads", "decoder_attention_heads", "linear_num_heads"), HEADS),
        **dict.fromkeys(KEY_HEADS, _keys(groups, heads)),
        "hidden_size": hidden,
        "intermediate_size": 96,
        **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        **dict.fromkeys(OF_EXPERTS, EXPERTS),
        **dict.fromkeys(VISITED, 2),
        **dict.fromkeys(("n_group", "topk_group"), 1),
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    if said.get("linear_num_value_heads") and said.get("linear_num_key_heads"):
        grouped = said["linear_num_value_heads"] != said["linear_num_key_heads"]
        wanted |= {"linear_num_value_heads": HEADS, "linear_num_key_heads": HEADS // 2 if grouped else HEADS}
    wanted |= _of_states(said, hidden)
    changed = _changed(said, wanted, alias)
    for name, value in said.items():
        if type(value) is int and value > WINDOW and REACH.search(name):
            changed[name] = WINDOW
        if isinstance(value, dict) and name in getattr(config, "sub_configs", {}):
            changed[name] = {**value, **_changed(value, wanted)}
        if isinstance(value, dict) and {"num_heads", "head_dim"} <= {*value}:  # of a recurrence
            changed[name] = {**value, "num_heads": HEADS, "head_dim": min(value["head_dim"], 16)}
        if isinstance(value, dict) and "llama_4_scaling_beta" in value:
            changed[name] = {**value, "original_max_position_embeddings": WINDOW}
        if isinstance(value, list | tuple) and len(value) == layers and layers > 1:
            changed[name] = [value[number] for number in numbers]
        if by_layer(value):
            its = {int(number): own for number, own in value.items()}
            there = {at: its[number] for at, number in enumerate(numbers) if number in its}
            changed[name] = {at: _own(own, groups, heads) for at, own in there.items()}
    if said.get(SHARED):
        changed[SHARED] = kept // 2
    return type(config).from_dict({**said, **changed})


def _changed(said: dict[str, Any], wanted: dict[str, Any], alias: Any = None) -> dict[str, Any]:
    """Those of the `wanted` keys that are there. A token that visits one expert still does."""
    own = {(alias or {}).get(name, name): (name, value) for name, value in wanted.items()}
    there = {key: each for key, each in own.items() if said.get(key) is not None}
    return {key: 1 if name in VISITED and said[key] == 1 else value for key, (name, value) in there.items()}


def _of_states(said: dict[str, Any], hidden: int) -> dict[str, int]:
    """Heads of a state space model, of the same width if they can be, and their groups: one, or one for each head, or
    some. Heads fill `mamba_expand` times the stream, which is `hidden` wide, unless `mamba_d_ssm` says what they fill.
    """
    heads, width, groups = (said.get(f"mamba_{name}") for name in ("n_heads", "d_head", "n_groups"))
    if not heads or type(width) is not int or not said.get("mamba_expand"):
        return {}
    filled = HEADS * width if said.get("mamba_d_ssm") else said["mamba_expand"] * hidden
    few = filled // width if filled % width == 0 else HEADS
    some = next((n for n in range(2, few + 1) if few % n == 0), 1)
    its = few if groups == heads else some if groups and groups > 1 else 1
    return {"mamba_n_heads": few, "mamba_d_head": filled // few, "mamba_n_groups": its, "mamba_d_ssm": filled}


def by_layer(value: Any) -> bool:
    """Whether the value of a key is a mapping from some layers, by number, to what they have of their own."""
    pairs = value.items() if isinstance(value, dict) else ()
    return bool(pairs) and all(str(number).isdigit() and isinstance(own, dict) for number, own in pairs)


def _keys(groups: int, heads: int) -> int:
    return HEADS if groups == heads else 1 if groups == 1 else HEADS // 2


def _own(own: dict[str, Any], groups: int, heads: int) -> dict[str, Any]:
    """What a layer has of its own, made small: key heads stay fewer, or more, than those of other layers."""
    if (its := own.get(KEYS)) is None:
        return own
    few, usual = _keys(its, heads), _keys(groups, heads)
    return {**own, KEYS: few if its == groups or few != usual else 1 if its < groups else HEADS}


def _of_most(config: Any, said: dict[str, Any], name: str) -> Any:
    """The value of a key; where layers differ in it, that of layers that name none of their own."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers does not tell one value for all layers
        return said.get(name)


def _layers_with_all_kinds(said: dict[str, Any], layers: int, model: nn.Module) -> list[int]:
    """The numbers of the layers that are kept: the first ones, and as many of the last if these have keys of others."""
    lists = [v for v in said.values() if isinstance(v, list | tuple) and len(v) == layers and layers > 1]
    own = [{int(number): each for number, each in v.items()} for v in said.values() if by_layer(v)]
    lists += [[each.get(number) for number in range(layers)] for each in own]
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    lists += [[[(name, type(m)) for name, m in block.named_modules()] for block in stack] for stack in stacks]
    kinds = [tuple(map(str, each)) for each in zip(*lists, strict=True)]
    needed = max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
    first_dense = said.get("first_k_dense_replace") or 0
    first = min(layers, max(2, needed, first_dense + 1))
    return [*range(first), *(range(layers - first, layers) if said.get(SHARED) else ())]
