"""What the processor of a folder makes of an image, and its tokens as text that a conversation can hold.

Shapes: L tokens of what the processor writes for an image, P axes of a family's positions.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait import PlaitError
from plait_transformers.one_sentence import one_sentence

OF_IMAGES = ["image_processor", "tokenizer"]


def processor_of(folder: str, config: Any) -> Any:
    """The folder's processor; if it cannot be built, without what it has for videos and sound, which may need other
    libraries than images do."""
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        return AutoProcessor.from_pretrained(folder)
    except (ImportError, OSError, ValueError):
        known: Any = PROCESSOR_MAPPING.get(type(config), None)
        if known is None or known.get_attributes()[:2] != OF_IMAGES:
            raise
        return without_videos(known).from_pretrained(folder)


def without_videos(kind: Any) -> Any:
    """The class of processors `kind`, for images and text alone."""
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: OF_IMAGES)})


def processed(processor: Any, file: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the processor makes of the image alone, without special tokens around it. Raises PlaitError for a file that
    is no image."""
    from PIL.Image import open as opening

    try:
        with opening(file) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise PlaitError(f"{file} is no image that can be read: {error}").at("images", str(file)) from None
    with one_sentence(f"{file}: the processor ends with"):
        given = processor(text=processor.image_token, images=[image], add_special_tokens=False, return_tensors="pt")
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in given.items()}


def with_text_behind(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """`given`, with four tokens of text after those of the image."""
    behind = {"input_ids": [5, 6, 7, 8], "attention_mask": [1] * 4}  # other marks are 0 for text
    of_tokens = {name for name, each in given.items() if each.shape == given["input_ids"].shape}
    return given | {n: torch.cat([given[n], given[n].new_tensor([behind.get(n, [0] * 4)])], 1) for n in of_tokens}


def as_text(processor: Any, ids: Tensor, token: int, file: Path) -> tuple[str, list[int]]:
    """The text of which the tokenizer makes the `ids` (L,) of an image, with one token of it for each run of them; and
    the length of each run. Raises PlaitError if there is no such text."""
    soft = ids == token
    first = soft & ~torch.nn.functional.pad(soft, (1, 0))[:-1]
    once = ids[~soft | first].tolist()
    starts, number = first.cumsum(0)[soft], int(first.sum())
    runs = torch.bincount(starts - 1, minlength=number).tolist()
    tokenizer: Any = processor.tokenizer
    texts = (tokenizer.decode(once), "".join(tokenizer.convert_ids_to_tokens(once)))
    for text in texts:
        if list(tokenizer(text, add_special_tokens=False)["input_ids"]) == once:
            return text, runs
    raise PlaitError(
        f"{file}: the processor writes tokens for an image that the tokenizer does not make of their text, {texts[0]!r}"
    ).at("model.images", str(file), fits="a processor such as llava's")


def features_of(whole: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """features (tokens, D) of one image; layer.0 and so on (tokens, D), of a family that has more for later layers."""
    of_text = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    with one_sentence("the vision tower ends with"):
        found = whole.get_image_features(**{name: each for name, each in given.items() if name not in of_text})
    later = enumerate(getattr(found, "deepstack_features", None) or ())
    tables = {"features": getattr(found, "pooler_output", found), **{f"layer.{number}": of for number, of in later}}
    return {
        name: torch.cat([each.flatten(0, -2) for each in (of if isinstance(of, list | tuple) else [of])])
        for name, of in tables.items()
    }


def positions_of(whole: Any, longer: dict[str, Tensor], token: int) -> tuple[Tensor, Tensor] | None:
    """places (tokens, P) and steps (tokens,) as `soft_tokens.Images` has them, of one image with text behind it; None
    for a family whose images have positions as text has."""
    module = next((m for m in whole.modules() if hasattr(m, "get_rope_index")), None)
    if module is None:
        return None
    takes = inspect.signature(module.get_rope_index).parameters
    with one_sentence("the positions of an image end with"):
        found, _ = module.get_rope_index(**{name: each for name, each in longer.items() if name in takes})
    positions, soft = found[:, 0], longer["input_ids"][0] == token
    places, steps = torch.zeros_like(positions), torch.zeros_like(positions[0])
    begins = 0
    for at, is_soft in enumerate(soft.tolist()):
        if is_soft:
            places[:, at] = positions[:, at] - begins
            steps[at] = 0 if soft[at + 1] else positions[0, at + 1] - begins
        else:
            begins = int(positions[0, at]) + 1  # of what follows; text has one position on all axes
    return places[:, soft].mT.contiguous(), steps[soft]
