"""Images as tokens of their own: what a frozen vision tower makes of each, computed once, before training.

    python -m plait_transformers.images FOLDER PHOTOS OUT

FOLDER: of a model that takes images. PHOTOS: a folder of image files. OUT: gets `index.json` and
`features.safetensors`. The ids of an image's tokens come after those of the vocabulary: token V + n has row n of the
features, in place of a row of the embedding. So an image is in a batch, and on a rank, wherever its tokens are.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait import PlaitError
from plait_transformers.build import decoder
from plait_transformers.language import text_part
from plait_transformers.one_sentence import one_sentence
from plait_transformers.soft_tokens import FEATURES, FORMAT, INDEX, tower_of

KINDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
TOKENS = ("image_token_id", "image_token_index")  # keys of a configuration: what a row of features replaces
BOUND = 1e-3  # of the largest logit, in float32


@torch.no_grad()
def write(folder: str, photos: str, out: str, dtype: torch.dtype = torch.float32) -> None:
    """The features of every image below `photos`, as the model of `folder` computes them, into `out`.

    Raises PlaitError for a folder without such a model, an image that cannot be read, and a family in which images act
    on the language part otherwise than as tokens: by positions, masks or layers of their own.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    with torch.device("meta"):
        part: Any = decoder(path=folder)
    passed = part.passed_on()
    if passed is None or text_part(part.whole.from_dict(part.kept)) is None:
        raise PlaitError(f"{folder} has no model that takes images: a folder with weights of one fits").at(
            "model.path", folder, fits="a folder of a model that takes images"
        )
    files = sorted(each for each in Path(photos).rglob("*") if each.suffix.lower() in KINDS)
    if not files:
        raise PlaitError(f"{photos} has no images ({', '.join(KINDS)})").at("images", photos, fits="a folder of images")
    with one_sentence(f"the images of {folder} cannot be computed: transformers ends with"):
        of_folder: Any = AutoModelForImageTextToText.from_pretrained
        whole = of_folder(folder, dtype=dtype).eval()
        processor: Any = AutoProcessor.from_pretrained(folder)
        mark = int(processor.image_token_id)
    size, first, longest = part.config.vocab_size, 0, 0
    token = next((found for key in TOKENS if (found := getattr(whole.config, key, None)) is not None), mark)
    images, rows = dict[str, list[int]](), list[Tensor]()
    for file in files:
        given = _processed(processor, file, dtype)
        ids = given["input_ids"][0]
        made = _features(whole, given)
        soft = ids == token
        if int(soft.sum()) != len(made):
            raise PlaitError(f"{file}: the processor writes {int(soft.sum())} tokens for {len(made)} features")
        if len(made) > longest:  # positions of a single token, say, are like those of text
            _check(whole, given, made, token, folder)
            longest = len(made)
        _check_splits(processor, ids[~soft].tolist(), file)
        ids[soft] = size + first + torch.arange(len(made))
        first += len(made)
        images[file.relative_to(photos).as_posix()] = ids.tolist()
        rows.append(made)
    there = Path(out)
    there.mkdir(parents=True, exist_ok=True)
    (there / INDEX).unlink(missing_ok=True)
    save_file({"features": torch.cat(rows)}, there / FEATURES)
    digest = hashlib.sha256((there / FEATURES).read_bytes()).hexdigest()
    index = {"format": FORMAT, "vocabulary": size, "token": mark, "features": digest, "images": images}
    index["tower"] = tower_of(folder, passed[1])
    (there / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _processed(processor: Any, file: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the processor makes of the image alone, without special tokens around it."""
    from PIL.Image import open as opening

    try:
        with opening(file) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise PlaitError(f"{file} is no image that can be read: {error}").at("images", str(file)) from None
    with one_sentence(f"{file}: the processor ends with"):
        given = processor(text=processor.image_token, images=[image], add_special_tokens=False, return_tensors="pt")
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in given.items()}


def _check_splits(processor: Any, ids: list[int], file: Path) -> None:
    """Raises PlaitError if an image's tokens hold words: in a conversation these might join those around it."""
    known = processor.tokenizer.added_tokens_decoder
    if words := [one for one in dict.fromkeys(ids) if one not in known]:
        raise PlaitError(
            f"{file}: the processor writes {processor.tokenizer.decode(words)!r} beside the tokens of an image, which "
            "may join the words around it: model.images takes images whose tokens are all special ones"
        ).at("model.images", str(file), fits="a processor such as llava's")


def _features(whole: Any, given: dict[str, Tensor]) -> Tensor:
    """(tokens, D) of one image."""
    of_text = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    with one_sentence("the vision tower ends with"):
        found = whole.get_image_features(**{name: each for name, each in given.items() if name not in of_text})
    found = getattr(found, "pooler_output", found)
    return torch.cat([each.flatten(0, -2) for each in (found if isinstance(found, list | tuple) else [found])])


def _check(whole: Any, given: dict[str, Tensor], made: Tensor, token: int, folder: str) -> None:
    """Raises PlaitError unless the features, as tokens of text, give the logits of the image."""
    behind = {"input_ids": [5, 6, 7, 8], "attention_mask": [1] * 4}  # text behind the image; other marks are 0 for it
    of_tokens = {name for name, each in given.items() if each.shape == given["input_ids"].shape}
    longer = given | {n: torch.cat([given[n], given[n].new_tensor([behind.get(n, [0] * 4)])], 1) for n in of_tokens}
    ids = longer["input_ids"]
    wanted = whole(**longer, use_cache=False).logits
    embedded = whole.get_input_embeddings()(ids)
    embedded[ids == token] = made.to(embedded.dtype)
    found = whole.get_decoder()(inputs_embeds=embedded, use_cache=False).last_hidden_state
    found = whole.get_output_embeddings()(found)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    if not error <= BOUND:
        raise PlaitError(
            f"model.images cannot be made for {whole.config.model_type} in {folder}: its images act on the language "
            "part otherwise than as tokens, by masks, positions or layers of their own"
        ).at("model.images", folder, fits="a family whose images are tokens, such as llava")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plait_transformers.images")
    for name in ("folder", "photos", "out"):
        parser.add_argument(name)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    given = parser.parse_args()
    try:
        write(given.folder, given.photos, given.out, getattr(torch, given.dtype))
    except PlaitError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
