"""What somebody may plant in a checkpoint: other metadata, tensors and manifests, with digests that are right."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from plait.checkpoint.choose import choose
from plait.checkpoint.files import digest
from plait.checkpoint.init_from import check_weights, read_weights
from plait.checkpoint.load import load
from plait.checkpoint.save import Saver
from plait.checkpoint.store import MANIFEST, Store, _digest_of
from plait.contract.config import Checkpoint
from plait.ops import HuggingFace, Rule
from plait_models.convert import convert

A, B = torch.arange(12.0).reshape(4, 3), torch.ones(3, dtype=torch.bfloat16)


class Mine(nn.Module):
    """The model whose weights `checkpoint` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 3))
        self.b = nn.Parameter(torch.zeros(3))

    def hugging_face(self) -> HuggingFace:
        return HuggingFace([Rule("a", "their.a"), Rule("b", "their.b")])


def checkpoint(folder: Path) -> Path:
    """A sound checkpoint in `folder`."""
    Saver(Store(folder), "sync").save({"model.a": A, "model.b": B}, 1)
    return folder / "step-1"


def _resume(path: Path) -> None:
    chosen = choose(Checkpoint(load=str(path)), Store(path.parent / "of its own"), print)
    load(chosen, {"model.a": torch.zeros(4, 3)})


def _init_from(path: Path) -> None:
    check_weights(path, {"a": (4, 3), "b": (3,)})
    read_weights(path, {"a": torch.zeros(4, 3), "b": torch.zeros(3)})


# Every way in which Plait reads a checkpoint.
WAYS: dict[str, Callable[[Path], object]] = {
    "load": lambda path: load(path, {"model.a": torch.zeros(4, 3)}),
    "resume": _resume,
    "init_from": _init_from,
    "convert": lambda path: convert(Mine(), path, path.parent / "converted", "hf"),
}


def sign(path: Path, **changes: Any) -> Path:
    """Make the manifest right for what now lies in the folder."""
    body = json.loads((path / MANIFEST).read_text())
    del body["digest"]
    files = {file.name: (file.stat().st_size, digest(file)) for file in path.iterdir() if file.name != MANIFEST}
    body = json.loads(json.dumps(body | {"files": files, **changes}))
    (path / MANIFEST).write_text(json.dumps({**body, "digest": _digest_of(body)}))
    return path


def plant(path: Path, metadata: bytes) -> Path:
    """Put `metadata` in the place of the checkpoint's."""
    (path / ".metadata").write_bytes(metadata)
    return sign(path)


def metadata_of(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())


class Calls:
    """As a pickle, a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.parts


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def text(value: str) -> bytes:
    """The instruction that puts `value` on an unpickler's stack."""
    return b"\x8c" + bytes([len(value.encode())]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


OURS = "torch.distributed.checkpoint.metadata"
START = b"\x80\x04"
# Pickles that run the command `touch`, or would if one more thing were allowed.
PICKLES: dict[str, Callable[[str], bytes]] = {
    "os.system": lambda touch: pickle.dumps(Calls(os.system, touch)),
    "os.system, protocol 0": lambda touch: pickle.dumps(Calls(os.system, touch), 0),
    "os.system, protocol 2": lambda touch: pickle.dumps(Calls(os.system, touch), 2),
    "eval": lambda touch: pickle.dumps(Calls(eval, f"__import__('os').system({touch!r})")),
    "torch.storage": lambda touch: pickle.dumps(
        Calls(torch.storage._load_from_bytes, saved(Calls(os.system, touch))),
    ),
    "torch.load": lambda touch: pickle.dumps(
        Calls(torch.serialization.load, Calls(io.BytesIO, saved(Calls(os.system, touch)))),
    ),
    "in an entry": lambda touch: pickle.dumps(
        Metadata(cast(Any, {"model.a": Calls(os.system, touch)}), storage_data={}),
    ),
    "beside entries": lambda touch: pickle.dumps(Metadata({}, Calls(os.system, touch), {})),
    "as a key": lambda touch: pickle.dumps(Metadata({}, None, {Calls(os.system, touch): 1})),
    "dotted name": lambda touch: START + named("torch.serialization", "os.system") + text(touch) + b"\x85R.",
    "getattr": lambda touch: (
        START + named("builtins", "getattr") + named("builtins", "__import__") + text("os") + b"\x85R"
        + text("system") + b"\x86R" + text(touch) + b"\x85R."
    ),
    "INST": lambda touch: b"(S" + repr(touch).encode() + b"\nios\nsystem\n.",
    "OBJ": lambda touch: b"(cos\nsystem\nS" + repr(touch).encode() + b"\no.",
    "NEWOBJ": lambda touch: (
        START + named("subprocess", "Popen") + b"(" + b"".join(map(text, touch.split())) + b"t\x85\x81."
    ),
    "state of a class": lambda touch: (
        START + named(OURS, "Metadata") + b"N}" + text("__setstate__") + named("posix", "system") + b"s\x86b."
    ),
}  # fmt: skip
