"""The language part of a model that takes images or sound too: it trains on text, and the rest is passed on.

transformers has a configuration of the part, `text_config`, and mostly a class that predicts the next token with it.
The model of the whole names its parameters otherwise; what it computes of text alone is tried.
"""

import functools
import importlib.util
import json
from typing import Any

import torch
from torch import nn

from plait import PlaitError
from plait_transformers.one_sentence import one_sentence

REST = "of the rest: "  # before the name of a tensor that the language part has not


def models_in(config: Any) -> set[str]:
    """The keys of `config` that hold configurations of models."""
    return {name for name, of in getattr(config, "sub_configs", {}).items() if getattr(of, "model_type", None) != ""}


def text_part(config: Any) -> Any:
    """The configuration of the language part of `config`, tied as the whole is; None for a model of text alone.

    Raises PlaitError if transformers cannot build the whole.
    """
    parts = models_in(config)
    if "text_config" not in parts or parts == {"text_config"} or class_of_whole(config) is None:
        return None
    part = type(config.text_config).from_dict(config.text_config.to_dict())
    family: Any = type(config)
    part.tie_word_embeddings = _is_tied(family, json.dumps(config.to_dict(), sort_keys=True, default=str))
    return part


@functools.lru_cache(maxsize=8)
def _is_tied(cls: Any, said: str) -> bool:
    whole = whole_on_meta(cls.from_dict(json.loads(said)))
    table, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    return head is not None and head.weight is table.weight


def class_of_whole(config: Any) -> Any:
    """transformers' class for `config`, with all inputs; None if it has none that writes text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = type(config)
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, None) or MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)


def class_with_head(config: Any) -> Any:
    """A class that predicts the next token, for the configuration of a language part: transformers' own, if it is in
    none of its mappings, or one made of its blocks. None for any other configuration."""
    from transformers import MODEL_MAPPING

    family = type(config)
    modeling = family.__module__.replace(".configuration_", ".modeling_")
    if getattr(config, "base_config_key", "") != "text_config" or importlib.util.find_spec(modeling) is None:
        return None
    for name, cls in vars(importlib.import_module(modeling)).items():
        if name.endswith("ForCausalLM") and getattr(cls, "config_class", None) is family:
            return cls
    base = MODEL_MAPPING.get(family, None)
    return None if base is None else _with_head(base)


@functools.cache
def _with_head(base: Any) -> Any:
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    class WithHead(base.__bases__[0]):  # the family's own: `_init_weights` and the like
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as transformers has it

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = base(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, **inputs: Any) -> Any:
            found = self.model(**inputs)
            logits = self.lm_head(found.last_hidden_state)
            return MoeCausalLMOutputWithPast(logits=logits, router_logits=getattr(found, "router_logits", None))

    return WithHead


def whole_on_meta(config: Any) -> Any:
    """The model of all inputs. Raises PlaitError if transformers cannot build it."""
    failed = f"model=transformers cannot build the whole model of {config.model_type}: transformers ends with"
    with one_sentence(failed), torch.device("meta"):
        return class_of_whole(config)._from_config(config, attn_implementation="eager")


def names_in_whole(whole: Any, text: Any) -> dict[str, str]:
    """FQN in the language part -> FQN in `whole`, of modules: of the blocks and of the head.

    Raises PlaitError if `whole` has no such modules.
    """
    table, head = text.get_input_embeddings(), text.get_output_embeddings()
    blocks = next(m for m in text.modules() if any(child is table for child in m.children()))
    found = {"": [fqn for fqn, m in whole.named_modules() if type(m) is type(blocks)]}
    found["head"] = [fqn for fqn, m in whole.named_modules() if m is whole.get_output_embeddings()]
    if any(len(each) != 1 for each in found.values()):
        raise PlaitError(
            f"model=transformers cannot train {whole.config.model_type} on text: {type(whole).__name__} has no "
            f"{type(blocks).__name__} with a head of its own"
        )
    own = {id(module): fqn for fqn, module in text.named_modules()}
    return {own[id(blocks)]: found[""][0], own[id(head)]: found["head"][0]}


def in_part(fqn: str, names: dict[str, str]) -> str | None:
    """The name in the language part of what `fqn` is in the whole; None if it has none."""
    for part, whole in names.items():
        if fqn.startswith(f"{whole}."):
            return f"{part}{fqn.removeprefix(whole)}"
    return None
