"""PLAIT_TRACE_PLUGINS=1: what a call of a hook changed in the model, in few lines, on one rank."""

import contextlib
import io
import os
import subprocess
import sys

import attrs
import pytest
import torch
from torch import nn

import plait
from plait import MeshAxis, hookimpl, transform_param
from plait.strategies.hook_trace import traced
from plait.strategies.hooks import Hooks
from plait.strategies.registry import create
from plait_testing import models
from tests.helpers.commands import environment


@attrs.define
class Acts:
    """Does in its hooks what it is given."""

    acts: dict = attrs.field(factory=dict)

    @hookimpl
    def parallelize(self, model):
        return self.acts["parallelize"](model)

    @hookimpl
    def build_mesh(self):
        yield MeshAxis("acts", 1, splits="batch")


@pytest.fixture
def shown(monkeypatch, capsys):
    """shown(act, model): the lines that tell what `act` did to it, without name, hook and time."""
    monkeypatch.setenv("PLAIT_TRACE_PLUGINS", "1")

    def run(act, model):
        Hooks({"it": Acts({"parallelize": act})}).fold("parallelize", "it", "model", model=model)
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.startswith("[plait] it.parallelize ")
        return [line.strip() for line in lines] or [head.partition(" ms: ")[2]]

    return run


def llama(n_layers=2):
    with torch.device("meta"):
        return models.llama3(n_layers=n_layers)


class Inside(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def wrap(model):
    for name, block in list(model.layers.named_children()):
        setattr(model.layers, name, Inside(block))


@pytest.mark.parametrize(("hook", "answer"), [("build_mesh", None), ("build_mesh", 3), ("configure", ["an item"])])
def test_only_a_list_of_axes_is_shown_item_by_item(hook, answer, capsys):
    assert traced("it", hook, lambda: answer, {}) == answer
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_nothing(shown):
    assert shown(lambda model: None, llama()) == ["nothing changed"]


def test_all_blocks_are_one_line_and_some_are_counted(shown):
    def hook(blocks):
        for block in blocks.values():
            block.register_forward_hook(lambda module, args, out: out)

    def some(*names):
        return shown(lambda model: hook({name: model.layers[name] for name in names}), llama(n_layers=4))

    said = "modules: forward hooks 0 -> 1: layers"
    assert some("0", "1", "2", "3") == [f"{said}.*"]
    assert some("0", "1", "3") == [f"{said}.* (3 of 4)"]
    assert some("2") == [f"{said}.2"]


def test_wrapped_modules_and_the_names_that_go_with_them(shown):
    lines = shown(wrap, llama(n_layers=3))
    assert lines[0] == "modules: wrapped, class Block -> Inside: layers.*"
    assert lines[1].startswith("parameters: renamed: layers.*.attention_norm.weight -> layers.*.inner.attention_norm.w")
    assert lines[1].endswith("and 5 more")
    assert len(lines) == 2


def test_another_module_around_all(shown):
    lines = shown(Inside, llama())
    assert lines[0] == "modules: wrapped, class Llama3 -> Inside: the whole model"
    assert "tok_embeddings.weight -> inner.tok_embeddings.weight" in lines[1]
    assert len(lines) == 2


def test_added_removed_and_replaced(shown):
    def act(model):
        model.norm = nn.Identity()
        model.router = nn.Sequential(nn.Linear(2, 2, bias=False))
        model.register_buffer("seen", torch.zeros(3))

    assert shown(act, llama()) == [
        "modules: replaced, class RMSNorm -> Identity: norm",
        "modules: added Sequential: router",
        "parameters: removed: norm.weight",
        "parameters: added plain: router.*.weight",
        "buffers: added plain: seen",
    ]


def test_what_a_module_computes_with(shown):
    def act(model):
        for block in model.layers.values():
            transform_param(block.attention.wq, "weight", torch.neg)
            block.forward = lambda *args: None

    lines = shown(act, llama())
    assert lines == [
        "modules: forward its class's -> its own: layers.*",
        "modules: transforms none -> weight: layers.*.attention.wq",
    ]


def test_what_is_stored(shown):
    def act(model):
        model.to(torch.bfloat16)
        model.output.weight.register_hook(lambda grad: grad)
        model.norm.weight = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))

    lines = shown(act, llama())
    change = "dtype torch.float32 -> torch.bfloat16"
    assert f"parameters: replaced, {change}, device meta -> cpu: norm.weight" in lines
    assert f"parameters: {change}, gradient hooks 0 -> 1: output.weight" in lines
    assert any(line.startswith(f"parameters: {change}: tok_embeddings.weight, layers.*") for line in lines)


def test_an_error_is_still_attributed(shown):
    def fail(model):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        shown(fail, llama())
    assert caught.value.__notes__ == ["raised by strategy 'it' in its hook 'parallelize'"]


def test_answers_that_are_generators_are_shown_and_used(monkeypatch, capsys):
    monkeypatch.setenv("PLAIT_TRACE_PLUGINS", "1")
    ((_, answer),) = Hooks({"it": Acts()}).answers("build_mesh", run=None, world_size=1)
    assert [axis.name for axis in answer] == ["acts"]
    assert "MeshAxis(name='acts', degree=1, splits='batch', shards=()" in capsys.readouterr().out


@attrs.define
class Chooser:
    name = "chooser"

    @hookimpl
    def configure(self, run):
        run.use("fsdp2", shard=2)

    @hookimpl
    def parallelize(self, run):
        run.storage_device = "cpu"


def traced_run():
    """What each rank prints while a real run is set up and makes a step."""
    os.environ["PLAIT_TRACE_PLUGINS"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            model = llama()
            applied = plait.apply(model, model.spec(), [Chooser()])
            applied.after_step(None, 1)
        return out.getvalue()
    finally:
        del os.environ["PLAIT_TRACE_PLUGINS"]


def test_one_rank_tells_of_a_real_run(plait_ranks):
    first, second = plait_ranks.run(traced_run, world=2)
    assert second == ""
    assert "[plait] chooser.configure " in first
    assert "strategies: added Fsdp2(shard=2, replicate=1" in first
    assert "settings: storage_device None -> cpu: run" in first
    assert "MeshAxis(name='dp_shard', degree=2, splits='batch'" in first
    assert "modules: class Block -> FSDPBlock, forward pre hooks 0 -> 1, forward hooks 0 -> 1: layers.*\n" in first
    assert "parameters: replaced, placements plain -> dp_shard: S(0): all 21\n" in first


def test_the_rank_is_known_before_there_is_a_group(monkeypatch, capsys):
    for key, value in (("PLAIT_TRACE_PLUGINS", "1"), ("RANK", "1")):
        monkeypatch.setenv(key, value)
    Hooks({"it": Acts()}).answers("build_mesh", run=None, world_size=2)
    assert capsys.readouterr().out == ""


LIGHT = """
import sys
from plait.strategies.hooks import Hooks
from plait.strategies.registry import create
from plait_testing import models
Hooks({"fsdp2": create("fsdp2", {})}).answers("build_mesh", run=None, world_size=1)
print("torch" in sys.modules, "plait.strategies.hook_trace" in sys.modules)
"""


@pytest.mark.parametrize(("variable", "last"), [("", "False False"), ("1", "False True")])
def test_it_costs_nothing_where_nobody_asked(variable, last):
    env = environment(PLAIT_TRACE_PLUGINS=variable)
    done = subprocess.run([sys.executable, "-c", LIGHT], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == last
    assert len(done.stdout.splitlines()) == (1 if not variable else 4)


def test_off_is_off(monkeypatch, capsys):
    monkeypatch.delenv("PLAIT_TRACE_PLUGINS", raising=False)
    Hooks({"fsdp2": create("fsdp2", {})}).answers("build_mesh", run=None, world_size=1)
    assert capsys.readouterr().out == ""
