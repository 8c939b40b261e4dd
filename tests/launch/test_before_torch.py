"""Mistakes that `plait train` tells before it imports torch, and what it reads in sources for that."""

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from plait.check.before_torch import check_before_torch
from plait.compose.stated import hints, lacks, may_define
from plait.host import compose

MISTAKES = {
    "model.dim=abc": "model.dim",
    "model._target_=nowhere.Model": "model._target_",
    "model._target_=plait_models.llama3.Llama4": "model._target_",
    "data._target_=nowhere.Data": "data._target_",
    "data=text": "data.path",
    "data=text data.path=/nowhere": "data.path",
    "data=text data.path=3": "data.path",
    "data=chat data.path=/nowhere": "data.path",
    "data=mix data.sources={a:{kind:chat,path:/nowhere}} data.weights={a:1}": "data.sources.a.path",
    "data=text data.path=/proc/self/status data.tokenizer=/nowhere": "data.tokenizer",
    "optimizer._target_=torch.optim.Adam2": "optimizer._target_",
    "optimizer.weight_decay=x": "optimizer.weight_decay",
    "optimizer.lr=-1": "optimizer.lr",
    "strategy=[fsdp2] strategy.fsdp2.shard=x": "strategy.fsdp2.shard",
    "strategy=[fsdp2] strategy.fsdp2=3": "strategy.fsdp2",
    "strategy=[fsdp2] optimizer.lr=-1": "optimizer.lr",
    "strategy=[simplefsdp] model.dim=???": "model.dim",
    "data=text data.path=/proc/self/status data.tokenizer=bytes data.eod_token=x": "data.eod_token",
    "checkpoint.load=/nowhere": "checkpoint.load",
    "checkpoint.init_from=/nowhere": "checkpoint.init_from",
    "checkpoint.dir=/proc/x": None,
    "checkpoint.memory_steps=100": "checkpoint.memory_steps",
}

PROGRAM = """
import json, pathlib, sys
from plait.check.before_torch import check_before_torch
from plait.contract.errors import PlaitError
from plait.host import compose
told = {}
for line in sys.argv[1:]:
    try:
        check_before_torch(compose(line.split()), pathlib.Path("runs/new"))
    except PlaitError as error:
        told[line] = error.key
print(json.dumps([told, "torch" in sys.modules]))
"""


def test_mistakes_are_told_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, *MISTAKES, "strategy=[fsdp2]"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(done.stdout) == [MISTAKES, False], done.stderr


def test_a_run_with_checkpoints_of_its_own_needs_no_others(tmp_path: Path) -> None:
    config = compose(["checkpoint.init_from=/nowhere", "checkpoint.load=/nowhere"])
    check_before_torch(config, tmp_path)


ALLOWED = {  # what the model, a strategy, or checkpoints elsewhere may bring
    "the tokenizer": ["data=chat", "data.path=TMP/chats/a.jsonl"],
    "that of a mixture": [
        *("data=mix", "data.sources={web: {kind: text, path: TMP/a.txt}, chat: {kind: chat, path: TMP/chats}}"),
        "data.weights={web: 3, chat: 1}",
    ],
    "the end of documents": ["data=text", "data.path=TMP", "data.eod_token='<|im_end|>'"],
    "checkpoints": ["checkpoint.dir=TMP", "checkpoint.load=/nowhere", "checkpoint.init_from=/nowhere"],
    "a rate": ["strategy=[simplefsdp]", "optimizer.lr=???"],
    "a path": ["strategy=[simplefsdp]", "data=text"],
}


@pytest.mark.parametrize("overrides", ALLOWED.values(), ids=ALLOWED)
def test_what_may_come_later_is_not_asked_for(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text("{}", encoding="utf-8")
    check_before_torch(compose([each.replace("TMP", str(tmp_path)) for each in overrides]), tmp_path / "new")


SOURCES = {
    "sure.py": "class Here: pass\ndef made(a: int, b: 'int' = 3, *, c: float | None = None, d: list[str]): pass\n",
    "star.py": "from os.path import *\n",
    "own.py": "def __getattr__(name): return name\n",
    "pack/__init__.py": "from .inner import Also, Kept as Given\n",
    "pack/inner.py": "import attrs\nAlso = 1\n@attrs.define\nclass Kept:\n    size: int\n"
    "    path: str = attrs.field(converter=str)\n    other: 'Any' = None\n    pair: tuple[int, ...] = ()\n",
    "base.py": "class Child(Parent):\n    x: int\nclass Made:\n    def __init__(self, x: bool): pass\n",
    "broken.py": "class (",
    "wide/__init__.py": "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n",
    "late.py": "locals()['Late'] = int\n",
    "hooks.py": "class Has:\n    def configure(self, run): pass\nclass Not: pass\nclass Child(Has): pass\n",
}


def write_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in SOURCES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)


class Far:
    """Knows a module that no folder has."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "pack.far" else None


@pytest.mark.parametrize(
    ("name", "may"), [("hooks.Has", True), ("hooks.Not", False), ("hooks.Child", True), ("gone.Anything", True)]
)
def test_which_classes_may_have_a_hook(name: str, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sources(tmp_path, monkeypatch)
    assert may_define(name, "configure") is may


@pytest.mark.parametrize(
    ("name", "why", "types"),
    [
        ("sure.Here", "", {}),
        ("sure.Gone", "AttributeError: module 'sure' has no attribute 'Gone'", {}),
        ("sure.made", "", {"a": int, "c": float | None, "d": list[str]}),
        ("sure.made.inner", "", {}),
        ("star.Anything", "", {}),
        ("own.Anything", "", {}),
        ("pack.Given", "", {"size": int, "pair": tuple[int, ...]}),
        ("pack.Other", "AttributeError: module 'pack' has no attribute 'Other'", {}),
        ("pack.inner.Other", "AttributeError: module 'pack.inner' has no attribute 'Other'", {}),
        ("base.Child", "", {}),
        ("base.Made", "", {"x": bool}),
        ("broken.Anything", "", {}),
        ("wide.elsewhere.Anything", "", {}),
        ("late.Late", "", {}),
        ("pack.far.Anything", "", {}),
        ("gone.Anything", "ModuleNotFoundError: No module named 'gone'", {}),
        ("not a name", "", {}),
        ("__main__.Anything", "", {}),
    ],
)
def test_what_a_source_says(
    name: str, why: str, types: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [Far, *sys.meta_path])
    assert (lacks(name), hints(name)) == (why, types)
    assert not {path.partition(".")[0].partition("/")[0] for path in SOURCES} & sys.modules.keys()  # none is imported
