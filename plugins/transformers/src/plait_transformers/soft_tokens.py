"""The tokens of images in a model: rows of frozen tables, in place of rows of the embedding.

Shapes: B batch, T tokens, D width of the stream, N tokens of all images, P axes of a family's positions.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait import PlaitError, is_planning, mix_in

INDEX, TABLES, FORMAT = "index.json", "features.safetensors", 2


class Hard:
    """Mixed into an embedding: 0 for tokens of images."""

    size: int  # of the vocabulary

    def forward(self, ids: Tensor) -> Tensor:
        plain: Any = super()
        soft = ids >= self.size
        return plain.forward(ids.masked_fill(soft, 0)).masked_fill(soft[..., None], 0)


class Images:
    """What tokens of images are to a model: token V + n has row n of the `tables`.

    tables: features (N, D). Of a family that gives images positions of their own also places (N, P), how far a token
    is on each axis from where its image begins, and steps (N,), by how much positions grow behind it. Of one that adds
    to the stream behind its first blocks, layer.0 (N, D), layer.1, ... None: those of `folder`, read when they are
    first needed.
    acts: what images do beside that. both_ways: their tokens see later ones of the same image. axes: P, or 0.
    layers: behind how many blocks they add to the stream.
    """

    def __init__(
        self, vocabulary: int, acts: Mapping[str, Any], tables: dict[str, Tensor] | None = None, folder: str = ""
    ) -> None:
        self.vocabulary, self.folder, self._tables = vocabulary, folder, tables
        self.both_ways, self.axes = bool(acts.get("both_ways")), int(acts.get("axes", 0))
        self.layers = int(acts.get("layers", 0))

    @property
    def act_on_rows(self) -> bool:
        """Whether a token of an image acts on others of its row otherwise than through attention to earlier ones."""
        return self.both_ways or self.axes > 0

    def features(self, ids: Tensor, like: Tensor) -> Tensor:
        """(B, T, D), as `like` is: the features of the tokens (B, T) of images, 0 for others. Waits for the ids."""
        return self._of_tokens("features", ids, torch.zeros_like(like, requires_grad=False))

    def positions(self, ids: Tensor, places: Tensor) -> Tensor:
        """`places` (B, T), which restart at 0 where a document starts; (1 + P, B, T), of a family that gives images
        positions of their own: `places`, and then those on each axis."""
        if not self.axes:
            return places
        steps = self._of_tokens("steps", ids, torch.ones_like(places))
        before = steps.cumsum(-1) - steps
        begins = before - before.where(places == 0, 0).cummax(-1).values
        own = self._of_tokens("places", ids, places.new_zeros(*places.shape, self.axes))
        return torch.cat([places[None], (begins[..., None] + own).movedim(-1, 0)])

    def added(self, ids: Tensor, like: Tensor) -> dict[str, Any]:
        """What the family's loop over blocks gets: where tokens of images are, (B, T), and what it adds to those behind
        each of the first blocks, (their number, D), as `like` is. Empty for families that add nothing."""
        if not self.layers or ids.is_meta or is_planning():
            return {}
        soft = ids >= self.vocabulary
        tables = (self._of_tokens(f"layer.{n}", ids, torch.zeros_like(like)) for n in range(self.layers))
        return {"visual_pos_masks": soft, "deepstack_visual_embeds": [table[soft] for table in tables]}

    def opened(self, mask: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        """`mask` (B, 1, T, T), bool or what is added to scores, in which the tokens of an image see each other.

        Those that follow each other in a document are of one image, as in transformers.
        """
        if not self.both_ways:
            return mask
        soft = ids >= self.vocabulary
        after = torch.nn.functional.pad(soft, (1, 0))[:, :-1] & (places != 0)
        number = (soft & ~after).cumsum(-1)
        one = (number[:, :, None] == number[:, None, :]) & soft[:, :, None] & soft[:, None, :]
        return mask.masked_fill(one[:, None], True if mask.dtype == torch.bool else 0.0)

    def _of_tokens(self, name: str, ids: Tensor, others: Tensor) -> Tensor:
        """`others`, with the rows of the table `name` for tokens of images."""
        if ids.is_meta or is_planning():
            return others  # there are no ids, and rows of any values cost the same
        if self._tables is None:
            from safetensors.torch import load_file

            self._tables = load_file(Path(self.folder) / TABLES)
        soft = ids >= self.vocabulary
        rows = self._tables[name][(ids[soft] - self.vocabulary).cpu()]
        others[soft] = rows.to(others.device, others.dtype)
        return others


def images_in(folder: str, vocabulary: int) -> tuple[Images, str]:
    """What the folder that `write` made has, and the digest of its tower. Raises PlaitError if there is no such
    folder, and for another vocabulary."""
    index = _index(Path(folder))
    if index["vocabulary"] != vocabulary:
        raise PlaitError(
            f"model.images={folder} was made for a vocabulary of {index['vocabulary']}, and the model's has "
            f"{vocabulary}: make it again, of model.path"
        ).at("model.images", folder, fits="a folder made for model.path")
    return Images(vocabulary, index["acts"], folder=folder), index["tower"]


def give_images(model: Any, images: Images) -> None:
    """Let `model` take the tokens of `images`."""
    model.images = images
    table = model.get_input_embeddings()
    mix_in(table, Hard)
    table.size = model.config.vocab_size


def _index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise PlaitError(
            f"model.images={folder} has no {INDEX} as python -m plait_transformers.images of this version writes it"
        ).at("model.images", str(folder), fits="a folder that this command wrote") from None
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
