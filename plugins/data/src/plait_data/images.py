"""The tokens of images that conversations name, from a folder that the model's package made."""

import hashlib
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from plait import PlaitError, near_miss

NAMES = ("image", "path", "url")  # keys of a part, the first that it has names the file


@attrs.frozen
class Image:
    """text: what stands in a conversation for the image. runs: how many tokens of the image each of its soft tokens
    stands for. first: the id of the first of them; the others follow it."""

    text: str
    runs: list[int]
    first: int


@attrs.frozen
class Images:
    """mark: what a template writes in place of an image. token: the id of the soft token in the texts of images."""

    folder: str
    mark: str
    token: int
    of: dict[str, Image]
    digest: str

    def written(self, text: str, named: list[str], where: str) -> str:
        """`text`, with the texts of the images `named`, in order, in place of their marks.

        Raises PlaitError for an image that is not there, and if there is not a mark for each.
        """
        for name in named:
            if name not in self.of:
                raise PlaitError(
                    f"{where}: there is no image {name} in data.images={self.folder}{near_miss(name, list(self.of))}"
                ).at("data.images", name, fits="images below the folder of which it was made")
        begin, *others = text.split(self.mark)
        if len(others) != len(named):
            raise PlaitError(
                f"{where}: it has {len(named)} images, and the chat template writes {len(others)} marks of an image"
            ).at("data.template", fits="a template that writes one mark for each image")
        return begin + "".join(self.of[name].text + other for name, other in zip(named, others, strict=True))

    def expanded(
        self, named: list[str], ids: np.ndarray, learned: np.ndarray, where: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """`ids` and `learned` (n,) of a written text, with the tokens of the images `named`, in order, in place of
        their soft tokens; nothing of an image is learned, from its first token to its last."""
        softs = np.flatnonzero(ids == self.token).tolist()
        images = [self.of[name] for name in named]
        if len(softs) != sum(len(image.runs) for image in images):
            raise PlaitError(
                f"{where}: its text has {len(softs)} tokens of an image, and its images have "
                f"{sum(len(image.runs) for image in images)}: a message may spell one out"
            ).at("data.template", fits="a template that writes one mark for each image")
        pieces, chosen, at, own = [], [], 0, iter(softs)
        for image in images:
            for number, (run, before) in enumerate(zip(image.runs, accumulate(image.runs, initial=0), strict=False)):
                soft = next(own)
                pieces += [ids[at:soft], np.arange(run, dtype=ids.dtype) + ids.dtype.type(image.first + before)]
                chosen += [learned[at:soft] & (number == 0), np.zeros(run, bool)]
                at = soft + 1
        return np.concatenate([*pieces, ids[at:]]), np.concatenate([*chosen, learned[at:]])


def images_of(folder: str | None) -> Images | None:
    """What the folder `data.images` has; None without one. Raises PlaitError if it has no index."""
    if folder in (None, "auto"):
        return None
    try:
        text = (Path(folder).expanduser() / "index.json").read_bytes()
        read = json.loads(text)
        size = int(read["vocabulary"])
        of = {name: Image(one["text"], one["runs"], size + one["first"]) for name, one in read["images"].items()}
        return Images(str(folder), str(read["mark"]), int(read["token"]), of, hashlib.sha256(text).hexdigest())
    except (OSError, ValueError, KeyError, TypeError):
        raise PlaitError(f"data.images={folder} has no index.json with the tokens of images").at(
            "data.images", folder, fits="a folder made for model.images"
        ) from None


def named_in(messages: list[dict[str, Any]]) -> list[str]:
    """The names of the images in `messages`, in order."""
    parts = (part for m in messages if isinstance(m.get("content"), list) for part in m["content"])
    return [name_of(part) for part in parts if is_image(part)]


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and bool(name_of(part))


def name_of(part: dict[str, Any]) -> str:
    """The name of the file; "" if the part has none."""
    return next((part[key] for key in NAMES if isinstance(part.get(key), str)), "")
