"""Tensors of files that a model has no parameter for, such as a vision tower's: an export has them as they are."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from safetensors import safe_open

from plait.checkpoint.weight_files import Files, open_files
from plait.contract.errors import PlaitError

if TYPE_CHECKING:
    from torch import Tensor


def passed_on(model: Any) -> "PassedOn | None":
    """What `model` says in `passed_on()`, the folder and the names of its tensors; None if it says nothing.

    Raises PlaitError if the folder cannot be read, or lacks one of the tensors.
    """
    said = getattr(model, "passed_on", lambda: None)()
    if said is None:
        return None
    folder, names = said
    files = open_files(Path(folder))
    if (lacking := next((name for name in names if name not in files.where), None)) is not None:
        raise PlaitError(
            f"the weights in {folder} lack {lacking!r}, which an export takes from there beside what is trained"
        ).at("passed_on", lacking, fits="a folder with all weights of the model")
    return PassedOn(files, tuple(names))


@attrs.frozen
class PassedOn:
    """files: those that have the tensors. names: which of these are passed on."""

    files: Files
    names: tuple[str, ...]

    def bytes_of(self) -> dict[str, int]:
        """Name -> bytes."""
        from plait.checkpoint.weights import DTYPES

        of = {name: DTYPES[self.files.dtypes[name]].itemsize for name in self.names}
        return {name: math.prod(self.files.shapes[name]) * size for name, size in of.items()}

    def read(self, name: str) -> "Tensor":
        """The tensor `name`, on the CPU."""
        with safe_open(self.files.where[name], framework="pt") as tensors:
            return tensors.get_tensor(name)
