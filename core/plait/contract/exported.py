"""What a strategy answers to the hook `export`."""

from typing import Any

import attrs


@attrs.frozen
class Export:
    """The content of an exported folder.

    tensors: name in the file -> tensor or DTensor; those of a DTensor's mesh have the same names in the same order.
    files:   name -> text of what lies beside; None: what the model itself puts beside its weights.
    stem:    of the weights' file, `<stem>.safetensors`.
    """

    tensors: dict[str, Any]
    files: dict[str, str] | None = None
    stem: str = "model"
