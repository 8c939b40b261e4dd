"""The tokens of images in a model: rows of a frozen table, in place of rows of the embedding."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait import PlaitError, mix_in

INDEX, FEATURES, FORMAT = "index.json", "features.safetensors", 1


class Hard:
    """Mixed into an embedding: 0 for tokens of images."""

    size: int  # of the vocabulary

    def forward(self, ids: Tensor) -> Tensor:
        plain: Any = super()
        soft = ids >= self.size
        return plain.forward(ids.masked_fill(soft, 0)).masked_fill(soft[..., None], 0)


class Images:
    """What the folder that `write` made has for the tokens of images. Raises PlaitError if there is no such folder."""

    def __init__(self, folder: str, vocabulary: int) -> None:
        index = _index(Path(folder))
        if index["vocabulary"] != vocabulary:
            raise PlaitError(
                f"model.images={folder} was made for a vocabulary of {index['vocabulary']}, and the model's has "
                f"{vocabulary}: make it again, of model.path"
            ).at("model.images", folder, fits="a folder made for model.path")
        self.folder, self.vocabulary, self.tower = folder, vocabulary, index["tower"]
        self._rows: Tensor | None = None

    def __call__(self, ids: Tensor, like: Tensor) -> Tensor:
        """(B, T, D), as `like` is: the features of the tokens (B, T) of images, 0 for others. Waits for the ids."""
        found = torch.zeros_like(like, requires_grad=False)
        if ids.is_meta:
            return found
        if self._rows is None:
            from safetensors.torch import load_file

            self._rows = load_file(Path(self.folder) / FEATURES)["features"]
        soft = ids >= self.vocabulary
        rows = self._rows[(ids[soft] - self.vocabulary).cpu()]
        found[soft] = rows.to(like.device, like.dtype)
        return found


def give_images(model: Any, folder: str) -> None:
    """Let `model` take the tokens of the images in `folder`."""
    model.images = Images(folder, model.config.vocab_size)
    table = model.get_input_embeddings()
    mix_in(table, Hard)
    table.size = model.config.vocab_size


def _index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise PlaitError(f"model.images={folder} has no {INDEX} as python -m plait_transformers.images writes it").at(
            "model.images", str(folder), fits="a folder that this command wrote"
        ) from None
    return index


def tower_of(folder: str | Path, names: list[str]) -> str:
    """Digest of the tensors `names` in the folder's files."""
    from safetensors import safe_open

    found, digest = dict[str, Tensor](), hashlib.sha256()
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in {*opened.keys()} & {*names}}
    for name in sorted(found):
        digest.update(name.encode())
        digest.update(found[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
