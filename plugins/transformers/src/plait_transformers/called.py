"""A decoder of transformers as it is built here, and as Plait calls it: all that a small copy of one needs too."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from plait import PlaitError, mix_in
from plait.ops import DocumentMask
from plait_transformers.attention import NAME, give_inner, refused, register
from plait_transformers.experts import give_sorted

RANDOM = re.compile("drop|jitter|noise")  # in the names of keys for what is drawn in training


def of_config(config: Any, attention: str = NAME) -> nn.Module:
    """The model of transformers' `config`, on the current device, in float32, without what is random in training."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    logging.disable_progress_bar()
    register()
    kept = config.to_dict()
    _refuse_selection(kept)
    config = type(config).from_dict({**kept, **_nothing_random(kept), "use_cache": False})
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = attention
    try:
        model = cls._from_config(config, attn_implementation=attention, experts_implementation="eager")
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise refused(config.model_type) from error  # it looks for the function in a dict of its own
    if attention == NAME:
        give_inner(model)
        give_sorted(model)
    _refuse_late_rope(model, config.model_type)
    mix_in(model, Called)
    model.documents = DocumentMask()
    model.architecture = cls.__name__
    model.max_seq_len = getattr(config, "max_position_embeddings", None)
    model.vocab_size = config.vocab_size
    return model


class Called:
    """Mixed into the class of transformers' model: called as Plait calls models."""

    documents: DocumentMask

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, V). `positions` (B, T) restart at 0 where a packed document starts; None: a row is one."""
        places = positions
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        # four dims: passed through to attention as it is
        mask = None if positions is None else self.documents(positions)
        plain: Any = super()
        return plain.forward(input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=False).logits

    def warn_if_padding_and_no_attention_mask(self, *args: Any, **kwargs: Any) -> None:
        """transformers looks at the values of tokens here, which costs time on a GPU."""


def _nothing_random(config: dict[str, Any]) -> dict[str, float]:
    return {name: 0.0 for name, value in config.items() if RANDOM.search(name) and isinstance(value, float)}


def _refuse_selection(config: dict[str, Any]) -> None:
    """An indexer chooses keys only in long sequences: the small copy would not see it act."""
    if keys := sorted(name for name, value in config.items() if name.startswith("index_") and value):
        raise PlaitError(
            f"model=transformers cannot train {config['model_type']}: an indexer chooses the keys that a token sees "
            f"({keys[0]}={config[keys[0]]}), and Plait's attention does not know such a choice"
        )


def _refuse_late_rope(model: nn.Module, kind: str) -> None:
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for each in types.values() if isinstance(types, dict) else [types]:
            if each is not None and ("dynamic" in each or each == "longrope"):
                raise PlaitError(
                    f"this {kind} has rope_type={each}, which changes RoPE with the length of the input; Plait trains "
                    "models whose positions turn in the same way at every length"
                )
