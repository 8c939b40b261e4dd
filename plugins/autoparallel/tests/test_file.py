"""A plan's file: what it must say, and for whom it is."""

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from plait.contract.config import Config
from plait.testing import raises_about
from plait_autoparallel import decide, file

BLOCKS = ["layers.0", "layers.1"]
GOOD: dict[str, Any] = {
    "version": 1,
    "run": {"model": "m", "parameters": 10, "world": 2},
    "decision": {
        "strategies": {"fsdp2": {"shard": 2}},
        "local_batch_size": 4,
        "global_batch_size": 8,
        "recompute": {"layers.*": "full"},
    },
}


class Run:
    config, parameters, world_size = Config(model={"_target_": "m"}), 10, 2


def read(tmp_path, node):
    path = tmp_path / "plan.yaml"
    path.write_text(node if isinstance(node, str) else yaml.safe_dump(node))
    return file.read(file.Text(str(path), file.text_of(path)), Run, BLOCKS)


def test_what_is_written_is_read(tmp_path):
    found = read(tmp_path, GOOD)
    assert found == file.Decision({"fsdp2": {"shard": 2}}, 4, 8, {"layers.*": "full"})


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"version": 2}, ("version", 2, (1,))),
        ({"run": {"model": "other"}}, ("model", "m", ("other",))),
        ({"run": {"world": 4}}, ("world", 2, (4,))),
        ({"run": {"parameters": 11}}, ("parameters", 10, (11,))),
        ({"decision": None}, ("decision",)),
        ({"decision": {"strategies": ["fsdp2"]}}, ("decision.strategies", ["fsdp2"])),
        (
            {"decision": {**GOOD["decision"], "local_batch_size": 0}},
            ("decision.local_batch_size", 0, "a whole number of at least 1"),
        ),
        (
            {"decision": {**GOOD["decision"], "recompute": {"layers.0": "some"}}},
            ("decision.recompute.layers.0", "some", ("none", "full")),
        ),
        ({"decision": {**GOOD["decision"], "recompute": {0: "full"}}}, ("decision.recompute", {0: "full"})),
        ({"decision": {**GOOD["decision"], "recomputed": {}}}, ("decision.recomputed",)),
        (
            {"decision": {**GOOD["decision"], "recompute": {"layers.7": "full"}}},
            ("decision.recompute", "layers.7", BLOCKS),
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, about):
    with raises_about(*about):
        read(tmp_path, {**GOOD, **change})


@pytest.mark.parametrize(("text", "key"), [("a: [", "strategy.autoparallel.plan"), ("just text", "version")])
def test_what_is_no_plan_is_refused(tmp_path, text, key):
    with raises_about(key):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path):
    with raises_about("strategy.autoparallel.plan"):
        file.text_of(tmp_path / "none.yaml")


def test_the_parts_of_a_step_add_up_and_only_several_micro_batches_are_added():
    price = SimpleNamespace(micro=0.5, step=2.0, adds=0.25)
    for micro, adds in ((1, 0.0), (4, 3 * 0.25)):
        step = SimpleNamespace(total=SimpleNamespace(seconds=20.0))
        parts = file._parts(SimpleNamespace(bubble=None, candidate=SimpleNamespace(micro=micro), price=price, mix=step))
        assert parts["adding gradients of micro-batches"] == adds
        assert parts["embedding, head and loss"] == micro * 0.5
        assert sum(parts.values()) == 20.0


@pytest.mark.parametrize(("given", "resumed", "meant"), [(None, 12, 12), (8, 12, 8), (None, None, 16)])
def test_a_run_that_goes_on_keeps_the_checkpoints_batch(given, resumed, meant):
    """Whatever its own plan, for 16 samples, says: a plan for other samples is not followed."""
    node = {"run": {"world": 2}, "asked": {}, "decision": {"global_batch_size": 16}}
    kept = file.Text(file.NAME, yaml.safe_dump(node))
    config = Config.of({"train": {"local_batch_size": 4, "global_batch_size": given}})
    run = SimpleNamespace(config=config, world_size=2, resumed_batch=resumed)
    assert decide._samples(run, kept) == meant
    assert decide._still_meant(kept, run, {}) == (meant == 16)
