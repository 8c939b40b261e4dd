"""Which class of transformers a configuration means: a decoder's, which predicts the next token, or an encoder's."""

from typing import Any

from torch import nn

from plait_transformers.language import class_with_head


def is_encoder(config: Any) -> bool:
    """Whether the model of `config` predicts masked tokens.

    Of a family that can do either, `architectures` tells, which a folder has; without it, `is_decoder`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
    from transformers import MODEL_FOR_MASKED_LM_MAPPING as MASKED

    family = type(config)
    if family not in MASKED or config.is_encoder_decoder:
        return False
    if family not in CAUSAL:
        return True
    said = config.architectures or ()
    masked, causal = (getattr(classes[family], "__name__", "") in said for classes in (MASKED, CAUSAL))
    if masked != causal:
        return masked
    return not getattr(config, "is_decoder", False)


def class_of(config: Any) -> Any:
    """The class that computes logits for `config`; None if transformers has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    mapping: Any = MODEL_FOR_MASKED_LM_MAPPING if is_encoder(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping.get(type(config), None) or class_with_head(config)


def first_place(model: Any) -> int:
    """The position of a row's first token: behind the row for padding, if the table of positions has one, as
    RoBERTa's."""
    tokens, length = model.get_input_embeddings(), getattr(model.config, "max_position_embeddings", None)
    for table in model.modules():
        if isinstance(table, nn.Embedding) and table is not tokens and table.num_embeddings == length:
            return 0 if table.padding_idx is None else int(table.padding_idx) + 1
    return 0
