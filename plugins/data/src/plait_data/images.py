"""The tokens of images that conversations name, from a folder that the model's package made."""

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from plait import PlaitError, near_miss

NAMES = ("image", "path", "url")  # keys of a part, the first that it has names the file


@attrs.frozen
class Images:
    """token: the id that a template writes in place of an image. ids: name -> the tokens that stand there instead."""

    folder: str
    token: int
    ids: dict[str, list[int]]
    digest: str

    def expanded(
        self, named: list[str], ids: np.ndarray, learned: np.ndarray, where: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """`ids` and `learned` (n,) with the tokens of the images `named`, in order, in place of their marks.

        Raises PlaitError for an image that is not there, and if there is not a mark for each.
        """
        for name in named:
            if name not in self.ids:
                raise PlaitError(
                    f"{where}: there is no image {name} in data.images={self.folder}{near_miss(name, list(self.ids))}"
                ).at("data.images", name, fits="images below the folder of which it was made")
        marks = np.flatnonzero(ids == self.token)
        if len(marks) != len(named):
            raise PlaitError(
                f"{where}: it has {len(named)} images, and the chat template writes {len(marks)} marks of an image"
            ).at("data.template", fits="a template that writes one mark for each image")
        pieces, chosen, at = [], [], 0
        for mark, name in zip(marks.tolist(), named, strict=True):
            own = np.array(self.ids[name], ids.dtype)
            pieces += [ids[at:mark], own]
            chosen += [learned[at:mark], np.zeros(len(own), bool)]
            at = mark + 1
        return np.concatenate([*pieces, ids[at:]]), np.concatenate([*chosen, learned[at:]])


def images_of(folder: str | None) -> Images | None:
    """What the folder `data.images` has; None without one. Raises PlaitError if it has no index."""
    if folder in (None, "auto"):
        return None
    try:
        text = (Path(folder).expanduser() / "index.json").read_bytes()
        read = json.loads(text)
        return Images(str(folder), int(read["token"]), dict(read["images"]), hashlib.sha256(text).hexdigest())
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
