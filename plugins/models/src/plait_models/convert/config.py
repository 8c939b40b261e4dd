"""config.json: written for Hugging Face's libraries, and compared with the model if there is one."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from plait import PlaitError
from plait.ops import HuggingFace

CONFIG = "config.json"
# Keys that may differ for the same weights: the class's name, the length of input, a module that Plait leaves out.
FREE = ("architectures", "max_position_embeddings", "num_nextn_predict_layers")


def config_of(table: HuggingFace, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json for a model with weights of `dtype`."""
    return {**table.config, "torch_dtype": str(dtype).removeprefix("torch.")}


def check_config(table: HuggingFace, source: Path) -> None:
    """Raises PlaitError if the config.json in `source`, if there is one, is of another model than `table`.

    Missing keys are accepted: the shapes of tensors reveal most differences.
    """
    path = source / CONFIG
    try:
        if os.path.lexists(path) and not path.is_file():  # reading a pipe or a device might never end
            raise OSError("it is neither a file nor a link to one")
        theirs = json.loads(path.read_bytes())
        if not isinstance(theirs, dict):
            raise ValueError("it holds no object")
        quantised, theirs = theirs.get("quantization_config"), _plain(theirs)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (ValueError, OSError, RecursionError) as error:
        raise PlaitError(f"{path} cannot be read: {error}") from None
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise PlaitError(f"{path} does not describe RoPE in a way that Plait knows: {error!r}") from None
    if quantised:
        raise PlaitError(f"{path} is of a quantised model, and Plait converts only unquantised weights")
    ours = _plain(table.config)
    for key, value in ours.items():
        if key not in FREE and key in theirs and theirs[key] != value:
            raise PlaitError(
                f"{path} says {key}={json.dumps(theirs[key])}, but the model has {json.dumps(value)}: "
                "choose another model=, or change its options"
            )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE in one form: versions of the libraries write `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    plain = dict(config)
    rope = {**(plain.pop("rope_scaling", None) or {}), **(plain.pop("rope_parameters", None) or {})}
    rope = {key: value for key, value in rope.items() if value is not None}
    plain["rope_theta"] = rope.pop("rope_theta", plain.get("rope_theta"))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind == "yarn":
        rope = {"beta_fast": 32, "beta_slow": 1, **rope}
        rope["attention_factor"] = round(rope.get("attention_factor") or _attention_factor(rope), 6)
    plain["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **rope}
    if plain["rope_theta"] is None:
        del plain["rope_theta"]
    return plain


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """The libraries' factor of RoPE's sine and cosine, if YaRN's options do not set it."""

    def sharper(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0

    both = rope.get("mscale"), rope.get("mscale_all_dim")
    return sharper(both[0]) / sharper(both[1]) if both[0] and both[1] else sharper(1)
