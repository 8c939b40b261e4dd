"""Mistakes that `plait train` tells before it imports torch, and what it reads in sources for that."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.check.before_torch import check_before_torch
from plait.compose.stated import hints, lacks
from plait.host import compose

MISTAKES = {
    "model.dim=abc": "model.dim",
    "model._target_=nowhere.Model": "model._target_",
    "model._target_=plait_models.llama3.Llama4": "model._target_",
    "data._target_=nowhere.Data": "data._target_",
    "data=text": "data.path",
    "data=text data.path=/nowhere": "data.path",
    "data=text data.path=3": "data.path",
    "data=text data.path=/proc/self/status data.tokenizer=/nowhere": "data.tokenizer",
    "optimizer._target_=torch.optim.Adam2": "optimizer._target_",
    "optimizer.weight_decay=x": "optimizer.weight_decay",
    "optimizer.lr=-1": "optimizer.lr",
    "strategy=[fsdp2] strategy.fsdp2.shard=x": "strategy.fsdp2.shard",
    "checkpoint.load=/nowhere": "checkpoint.load",
    "checkpoint.init_from=/nowhere": None,
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


def test_a_tokenizer_that_the_model_may_bring_is_not_asked_for(tmp_path: Path) -> None:
    check_before_torch(compose(["data=chat", "data.path=/nowhere"]), tmp_path)


SOURCES = {
    "sure.py": "class Here: pass\ndef made(a: int, b: 'int' = 3, *, c: float | None = None, d: list[str]): pass\n",
    "star.py": "from os.path import *\n",
    "own.py": "def __getattr__(name): return name\n",
    "pack/__init__.py": "from .inner import Kept as Given\n",
    "pack/inner.py": "import attrs\n@attrs.define\nclass Kept:\n    size: int\n"
    "    path: str = attrs.field(converter=str)\n    other: 'Any' = None\n    pair: tuple[int, ...] = ()\n",
    "base.py": "class Child(Parent):\n    x: int\nclass Made:\n    def __init__(self, x: bool): pass\n",
    "broken.py": "class (",
}


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
        ("gone.Anything", "ModuleNotFoundError: No module named 'gone'", {}),
        ("not a name", "", {}),
        ("__main__.Anything", "", {}),
    ],
)
def test_what_a_source_says(
    name: str, why: str, types: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in SOURCES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert (lacks(name), hints(name)) == (why, types)
    assert not {path.partition(".")[0].partition("/")[0] for path in SOURCES} & sys.modules.keys()  # none is imported
