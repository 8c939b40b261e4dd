"""The configuration of a model: of a local folder, of given keys, or of both. Nothing is downloaded, and no code of a
folder is run."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait import TOKENIZER_FILES, PlaitError
from plait_transformers.encoders import class_of
from plait_transformers.language import models_in, text_part
from plait_transformers.one_sentence import in_a_line
from plait_transformers.shrink import by_layer

CONFIG = "config.json"
FLOAT = "__float__"  # the only key of an object that stands for a number that JSON does not have
LAYERS, TEXT = "num_hidden_layers", "text_config"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
KEPT = (  # what lies beside the weights, all of it text
    *(*TOKENIZER_FILES, "generation_config.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)


def read_config(path: str | None, given: Mapping[str, Any], say: Callable[[str], None] = lambda line: None) -> Any:
    """transformers' configuration. Raises PlaitError, naming the key, for what is not that of a decoder
    or an encoder.

    say: gets a line if lists in the folder's are cut to fewer layers.
    """
    if path is None and "model_type" not in given:
        raise PlaitError(
            "model=transformers takes model.path, a folder as save_pretrained writes it, or model.config with a "
            "model_type and sizes, such as {model_type: llama, num_hidden_layers: 4}, and has neither"
        ).at("model.path", fits="a folder of Hugging Face's")

    import transformers
    from transformers import CONFIG_MAPPING

    stored = {} if path is None else _stored(Path(path))
    known = _over(stored, given, say)
    where = "model.config" if path is None else f"{Path(path) / CONFIG}"
    kind = known.get("model_type")
    key, version = ("model.config" if path is None else "model.path"), transformers.__version__
    if not isinstance(kind, str):
        raise PlaitError(f"{where} has no model_type, such as model_type: llama").at(key, path, fits="a model_type")
    if kind not in CONFIG_MAPPING:
        code = ", and Plait does not run the code of a folder" if "auto_map" in stored else ""
        raise PlaitError(f"{where} has model_type={kind}, which transformers {version} does not have{code}").at(
            key, path, fits="a decoder of transformers"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(known)
    except Exception as error:
        raise PlaitError(f"{where} is not a configuration of {kind}: {in_a_line(error)}").at(key, path) from error
    _check_known(config, given)
    of_text = models_in(config) <= {TEXT} and class_of(config) is not None
    part = None if of_text or config.is_encoder_decoder else text_part(config)
    if config.is_encoder_decoder or not (of_text or (part is not None and class_of(part) is not None)):
        raise PlaitError(
            f"{where} has model_type={kind}, which is not a decoder or an encoder of text, and has no part that "
            "transformers has as one; model=transformers trains models that predict the next token, or masked ones"
        ).at(key, path, fits="a decoder or an encoder of transformers")
    if (file := stored.get("transformers_weights")) is not None:
        raise PlaitError(
            f"{where} has transformers_weights={file}, and Plait reads model.safetensors or its index: give the file "
            "that name, and remove the key"
        ).at(key, path, fits="a folder without transformers_weights")
    if (packed := known.get("quantization_config")) is not None:
        method = packed.get("quant_method") if isinstance(packed, dict) else packed
        raise PlaitError(
            f"{where} has a quantization_config ({method}); model=transformers trains floating-point weights: save the "
            "model without quantisation first"
        ).at(key, path, fits="a folder of weights in floating point")
    return config


def _over(
    stored: Mapping[str, Any], given: Mapping[str, Any], say: Callable[[str], None], at: str = ""
) -> dict[str, Any]:
    """`given` over `stored`, in the language part of a model with more inputs too. at: before their keys' names."""
    known = {**_with_layers(stored, given, say, at), **given}
    if isinstance(stored.get(TEXT), Mapping) and isinstance(given.get(TEXT), Mapping):
        known[TEXT] = _over(stored[TEXT], given[TEXT], say, f"{TEXT}.")
    return known


def _check_known(config: Any, given: Mapping[str, Any], at: str = "") -> None:
    """Raises PlaitError if a key of `given` is none of this kind of configuration. at: before its name."""
    kind, text = config.model_type, getattr(config, TEXT, None)
    usual = _usual(type(config))
    for name, value in given.items():
        if name != "model_type" and not _has(usual, name):
            where = f"model.config.{at}{name}"
            there = f"; its {TEXT} has one" if text is not None and _has(_usual(type(text)), name) else ""
            raise PlaitError(f"unknown key {where}: a configuration of {kind} has no such key{there}").at(where, value)
        if name == TEXT and isinstance(value, Mapping) and text is not None:
            _check_known(text, value, f"{TEXT}.")


def _with_layers(
    stored: Mapping[str, Any], given: Mapping[str, Any], say: Callable[[str], None], at: str = ""
) -> dict[str, Any]:
    """`stored`, whose lists with an entry per layer, and mappings from layers, are cut to the number of layers that is
    `given`. at: before the names of its keys.

    Raises PlaitError for more layers than such a list has entries, unless the list is given too.
    """
    had, layers = stored.get(LAYERS), given.get(LAYERS)
    if type(layers) is not int or type(had) is not int or layers == had:
        return dict(stored)
    per_layer = [name for name, value in stored.items() if isinstance(value, list) and len(value) == had > 1]
    lists = [name for name in per_layer if name not in given]
    if layers > had and lists:
        raise PlaitError(
            f"model.config.{at}{LAYERS}={layers} is more than the {had} layers that {lists[0]} of config.json "
            f"describes: give model.config.{at}{lists[0]} too, with {layers} entries"
        ).at(f"model.config.{at}{LAYERS}", layers, fits=f"at most {had}")
    cut = {name: stored[name][:layers] for name in lists}
    for name, value in stored.items():
        if by_layer(value) and name not in given and any(int(number) >= layers for number in value):
            cut[name] = {number: own for number, own in value.items() if int(number) < layers}
    if cut:
        verb = "is" if len(cut) == 1 else "are"
        say(f"model: {', '.join(at + name for name in cut)} of config.json {verb} cut from {had} layers to {layers}")
    return {**stored, **cut}


def has_weights(path: str) -> bool:
    return any(Path(path).glob("*.safetensors"))


def usual_of(kind: str) -> Any:
    """The configuration that the family `kind` has without keys; its class, if it has none."""
    from transformers import CONFIG_MAPPING

    return _usual(CONFIG_MAPPING[kind])


def _usual(cls: Any) -> Any:
    try:
        return cls()
    except Exception:  # what the family asks of its own usual values, for example
        return cls


def _has(usual: Any, name: str) -> bool:
    try:
        return hasattr(usual, name) or name in getattr(usual, "__dataclass_fields__", {})
    except Exception:  # a key in which layers differ
        return True


def _stored(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        content = json.loads(file.read_bytes(), object_hook=_from_json)
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {CONFIG}" if folder.is_dir() else "is not a folder"
        hub = (
            ""
            if folder.exists() or not HUB_ID.fullmatch(str(folder))
            else (f"; of a model of the hub, this makes one: hf download {folder} --local-dir {folder.name}")
        )
        raise PlaitError(f"model.path={folder} {what}; it takes a local folder as save_pretrained writes it{hub}").at(
            "model.path", str(folder), fits=f"a local folder with {CONFIG}"
        ) from None
    except (OSError, ValueError) as error:
        raise PlaitError(f"{file} cannot be read: {error}").at("model.path", str(folder)) from None
    if not isinstance(content, dict):
        raise PlaitError(f"{file} holds no object").at("model.path", str(folder))
    return content


def beside(path: str | None, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the files that belong to weights of `config`; those of the folder `path` as they are there."""
    found = {name: Path(path) / name for name in KEPT} if path is not None else {}
    kept = {name: file.read_text(encoding="utf-8") for name, file in found.items() if file.is_file()}
    return {CONFIG: json.dumps(_to_json(config), indent=2, sort_keys=True, default=str) + "\n", **kept}


def _to_json(value: Any) -> Any:
    """`value` as transformers writes it: JSON has no infinite numbers, such as Nemotron-H's limit of a time step."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {name: _to_json(each) for name, each in value.items()}
    return [_to_json(each) for each in value] if isinstance(value, list | tuple) else value


def _from_json(held: dict[str, Any]) -> Any:
    return float(held[FLOAT]) if {*held} == {FLOAT} else held
