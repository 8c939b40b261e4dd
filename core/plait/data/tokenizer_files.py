"""The files of the tokenizer that a run's data is read with: what lies beside the weights that were trained on it."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from plait.contract.errors import PlaitError

TOKENIZER_FILES = (  # in a folder of Hugging Face's; all of it text
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja"),
)
TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
WITH_IDS = ("config.json", "generation_config.json")  # what names ids of special tokens


@attrs.frozen
class Used:
    """files: name -> text; empty for bytes, which no file describes. eos: ids that end a text or an answer, the first
    ends a document. bos, pad: ids, if the tokenizer's files name such a token."""

    files: dict[str, str]
    eos: list[int] = attrs.field(factory=list)
    bos: int | None = None
    pad: int | None = None

    def beside(self, model: Mapping[str, str]) -> dict[str, str]:
        """What lies beside the weights: `model`, the model's own files (name -> text), with this tokenizer."""
        other = self.files.get(TOKENIZER) != model.get(TOKENIZER)
        kept = {name: text for name, text in model.items() if name not in TOKENIZER_FILES} | self.files
        for name in WITH_IDS:
            if name in kept and self.files:
                kept[name] = self._with_ids(kept[name], other)
        return kept

    def _with_ids(self, text: str, other: bool) -> str:
        """`text` of a config whose ids are those of this tokenizer; those of the model's own stay."""
        content = json.loads(text)
        before = content.get("eos_token_id")
        named = before if isinstance(before, list) else [] if before is None else [before]
        ids = list(dict.fromkeys([*self.eos, *([] if other else named)]))
        new: dict[str, Any] = {}
        if other:
            new |= {"bos_token_id": self.bos, "pad_token_id": self.pad}
        if ids and (other or not set(ids) <= set(named)):
            new["eos_token_id"] = ids if len(ids) > 1 else ids[0]
        if all(content.get(key) == value for key, value in new.items()):
            return text
        return json.dumps({**content, **new}, indent=2, sort_keys=True) + "\n"


def files_of(data: Mapping[str, Any]) -> dict[str, str] | None:
    """Name -> text of the tokenizer that the config node `data` names, with its chat template; empty for bytes.

    None if the node names no tokenizer. Raises OSError and ValueError if a file cannot be read.
    """
    name = data.get("tokenizer")
    if not isinstance(name, str):
        return None
    if name in ("bytes", "auto"):
        return {}
    path = Path(name).expanduser()
    if path.is_file() and path.name != TOKENIZER:
        files = {TOKENIZER: _read(path)}
    else:
        files = files_in(path if path.is_dir() else path.parent)
    if data.get("template") is not None:
        files[TEMPLATE] = _read(Path(str(data["template"])).expanduser())
        if CONFIG in files and "chat_template" in (config := json.loads(files[CONFIG])):
            del config["chat_template"]
            files[CONFIG] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return files


def files_in(folder: Path, more: Iterable[str] = ()) -> dict[str, str]:
    """Name -> text of a tokenizer's files in the folder; `more`: names of further files."""
    return {name: _read(folder / name) for name in (*TOKENIZER_FILES, *more) if (folder / name).is_file()}


def used_by(source: Any, files: dict[str, str] | None) -> Used | None:
    """What the data source reads text with; `files` are `files_of` its node of the config, read when the run began.
    None if the node names no tokenizer."""
    if not files:
        return None if files is None else Used({})
    ends, begin = source.special_ids() if hasattr(source, "special_ids") else ([], None)
    return Used(files, list(dict.fromkeys(ends)), begin, _pad(files))


def said_of_export(data: Mapping[str, Any], model: Any, tokens: int | None) -> str | None:
    """A line for the user if the weights are exported with another tokenizer or template than the model's own.

    tokens: how many the data's tokenizer has; None: not known.
    """
    own, name, template = getattr(model, "tokenizer_from", None), data.get("tokenizer"), data.get("template")
    if not isinstance(name, str) or own is None:
        return None
    if name in ("bytes", "auto"):
        return f"export: no tokenizer, because data.tokenizer={name} has no file; that of {own} is not what trained"
    path = Path(name).expanduser()
    path = path.parent if path.is_file() and path.name == TOKENIZER else path
    parts = [] if template is None else [f"the chat template is data.template={template}"]
    if os.path.realpath(path) != os.path.realpath(own):
        size = getattr(model, "vocab_size", None)
        differs = f", and the model's vocabulary {size}" if size not in (None, tokens) else ""
        has = "" if tokens is None else f"; it has {tokens} tokens{differs}"
        parts.insert(0, f"the tokenizer is data.tokenizer={name}, not that of {own}{has}")
    return f"export: {'; '.join(parts)}" if parts else None


def _pad(files: Mapping[str, str]) -> int | None:
    config = json.loads(files.get(CONFIG, "{}"))
    token = config.get("pad_token") if isinstance(config, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    added = json.loads(files[TOKENIZER]).get("added_tokens") if TOKENIZER in files else None
    return next((one["id"] for one in added or () if token is not None and one.get("content") == token), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlaitError(f"{path} is not text in UTF-8: byte {error.start} is wrong").at(
            "data.tokenizer", str(path), fits="files in UTF-8"
        ) from error
