"""Images as tokens of their own: what a frozen vision tower makes of each, computed once, before training.

    python -m plait_transformers.images FOLDER PHOTOS OUT

FOLDER: of a model that takes images. PHOTOS: a folder of image files. OUT: gets `index.json` and
`features.safetensors`. The ids of an image's tokens come after those of the vocabulary: token V + n has row n of the
features, in place of a row of the embedding. So an image is in a batch, and on a rank, wherever its tokens are.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait import PlaitError
from plait.ops import DocumentMask
from plait_transformers.attention import NAME, give_inner, register
from plait_transformers.build import decoder
from plait_transformers.language import text_part
from plait_transformers.one_sentence import one_sentence
from plait_transformers.processed import as_text, features_of, positions_of, processed, processor_of, with_text_behind
from plait_transformers.soft_tokens import FORMAT, INDEX, TABLES, Images, tower_of

KINDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
TOKENS = ("image_token_id", "image_token_index")  # keys of a configuration: what a row of features replaces
BOUND = 1e-3  # of the largest element of the stream before the head, in float32


@torch.no_grad()
def write(folder: str, photos: str, out: str, dtype: torch.dtype = torch.float32) -> None:
    """The features of every image below `photos`, as the model of `folder` computes them, into `out`.

    Raises PlaitError for a folder without such a model, an image that cannot be read, and a family in which images act
    on the language part otherwise than `soft_tokens.Images` does, such as by layers of their own.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

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
        processor: Any = processor_of(folder, whole.config)
        mark = int(processor.image_token_id)
    size, first, longest = part.config.vocab_size, 0, 0
    token = next((found for key in TOKENS if (found := getattr(whole.config, key, None)) is not None), mark)
    through_inner = part.facts.how == NAME
    images, tables, acts = dict[str, Any](), dict[str, list[Tensor]](), list[dict[str, Any]]()
    for file in files:
        given = processed(processor, file, dtype)
        longer = with_text_behind(given)
        own = features_of(whole, given)
        count = len(own["features"])
        text, runs = as_text(processor, given["input_ids"][0], token, file)
        if sum(runs) != count:
            raise PlaitError(f"{file}: the processor writes {sum(runs)} tokens for {count} features")
        if (positions := positions_of(whole, longer, token)) is not None:
            own["places"], own["steps"] = positions
        if count > longest:  # positions of a single token, say, are like those of text
            acts = _that_act_so(whole, longer, own, token, acts or _ways(own, part), through_inner)
            if not acts:
                raise _refused(whole.config.model_type, folder)
            longest = count
        images[file.relative_to(photos).as_posix()] = {"text": text, "runs": runs, "first": first}
        first += count
        for name, table in own.items():
            tables.setdefault(name, []).append(table)
    there = Path(out)
    there.mkdir(parents=True, exist_ok=True)
    (there / INDEX).unlink(missing_ok=True)
    save_file({name: torch.cat(tables[name]) for name in _used(tables, acts[0])}, there / TABLES)
    digest = hashlib.sha256((there / TABLES).read_bytes()).hexdigest()
    index = {"format": FORMAT, "vocabulary": size, "mark": processor.image_token, "token": token, "features": digest}
    index |= {"acts": acts[0], "tower": tower_of(folder, passed[1]), "images": images}
    (there / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _ways(own: dict[str, Tensor], part: Any) -> list[dict[str, Any]]:
    """How images may act on `part`, the simplest first."""
    masks = [{"both_ways": True}] if part.documents is not None else []
    places = {"axes": own["places"].shape[1]} if "places" in own else {}
    later = {"layers": count} if (count := sum(name.startswith("layer.") for name in own)) else {}
    return [{}, *masks, *([places] if places else []), *([places | later] if later else [])]


def _used(names: Iterable[str], acts: dict[str, Any]) -> list[str]:
    """Those of the tables `names` that images which act so have."""
    without = [name for name, act in (("places", "axes"), ("steps", "axes"), ("layer", "layers")) if act not in acts]
    return [name for name in names if name.split(".")[0] not in without]


def _that_act_so(
    whole: Any, longer: dict[str, Tensor], own: dict[str, Tensor], token: int, ways: list[dict[str, Any]], inner: bool
) -> list[dict[str, Any]]:
    """Those of `ways` in which the language part makes of the image's tokens `own` what the whole makes of the image.

    inner: attention is that which trains. Compared is what the head gets.
    """
    seen = list[Tensor]()
    hook = whole.get_output_embeddings().register_forward_pre_hook(lambda head, args: seen.append(args[0]))
    whole(**longer, use_cache=False)
    hook.remove()
    ids, part = longer["input_ids"].clone(), whole.get_decoder()
    embedded = whole.get_input_embeddings()(ids)
    soft = ids == token
    ids[soft] = (size := int(ids.max()) + 1) + torch.arange(int(soft.sum()))
    places = torch.arange(ids.shape[1])[None]
    found = []
    for way in ways:
        images = Images(size, way, own)
        stream = embedded.clone()
        stream[soft] = images.features(ids, stream)[soft]
        mask = images.opened(DocumentMask()(places, None if inner else stream.dtype), ids, places)
        more: dict[str, Any] = {"attention_mask": mask} if images.both_ways else {}
        more |= {"position_ids": images.positions(ids, places)} if images.axes else {}
        more |= images.added(ids, stream)
        with _through_inner(part) if inner else nullcontext():
            made = part(inputs_embeds=stream, **more, use_cache=False).last_hidden_state
        if float((made - seen[0]).abs().max() / seen[0].abs().max()) <= BOUND:
            found.append(way)
    return found


@contextmanager
def _through_inner(part: Any) -> Iterator[None]:
    """The attention of `part` is that which trains."""
    register()
    before = part.config._attn_implementation
    give_inner(part, causal=True)
    part.config._attn_implementation = NAME
    try:
        yield
    finally:
        part.config._attn_implementation = before


def _refused(kind: str, folder: str) -> PlaitError:
    return PlaitError(
        f"model.images cannot be made for {kind} in {folder}: its images act on the language part otherwise than as "
        "tokens with positions of their own, or tokens that see each other"
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
