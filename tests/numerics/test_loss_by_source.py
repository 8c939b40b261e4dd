"""The loss of each source of a mixture is that of one process in every layout, token by token."""

import sys
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from plait.host import check, compose
from plait.train import loss_by_source
from plait_testing import whole_run

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

BOUND = 1e-12  # of losses, in float64
STEPS = 2
SOURCES = "data.sources={a: {kind: text, path: %s, attention: document}, b: {kind: text, path: %s}}"
TINY = ("train.seq_len=16", "model.n_layers=2", "model.dim=16", "model.ffn_dim=16", "validation.interval=0")
MIX = ("data=mix", "data.weights={a: 2, b: 1}", "data.tokenizer=bytes", "checkpoint.enabled=false")
LAYOUTS = {
    "fsdp2": (2, {"fsdp2": {}}),
    "tensor_parallel": (2, {"tensor_parallel": {"degree": 2}}),
    "context_parallel": (2, {"context_parallel": {"degree": 2}, "fsdp2": {}}),
    "pipeline and fsdp2": (4, {"pipeline": {"degree": 2}, "fsdp2": {}}),
}
CHUNKS = ("loss.chunks=3",)
MORE = ("fsdp2", "context_parallel", "tensor_parallel")  # of the same calls


def config(folder, strategies, world, *more):
    other = folder / "b.txt"
    other.write_text("a rope of strands, " * 300)
    (folder / "versions.json").write_text("{}")
    given = whole_run.overrides(strategies, folder, world, *TINY, *more)
    without = [one for one in given if not one.startswith("data")]
    node = check(compose([*without, *MIX, SOURCES % (whole_run.text(folder), other)]), world).config
    for key in ("param", "storage", "reduce"):
        node = node.with_value(f"precision.{key}", "float64")
    return node.with_value("train.steps", STEPS)


def trained(node, folder, bug=None):
    """The rows of a run; on one process also (sum, tokens) by source of its first step, from the logits by hand."""
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    seen, by_hand = whole_run.Rows(), {}
    trainer = Trainer(node, RunFolder(folder), lambda line: None, [seen])
    if not trainer.mesh.layout.dense:
        batch = trainer.batches.take(0)
        with torch.no_grad():
            logits = trainer.parts[0](*batch.arguments())
        losses = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none").sum(1)
        for number, name in enumerate(trainer.batches.sources):
            mine = batch.sources == number
            by_hand[name] = float(losses[mine].sum() / (batch.labels[mine] != -100).sum())
    with mock.patch.object(loss_by_source.LossBySource, *BUGS[bug]) if bug else mock.MagicMock():
        trainer.fit()
    return seen.rows, by_hand


def no_stages(self):
    with mock.patch("plait.parallel.divided_layers.over_stages"):
        CLIP(self)


def every_rank(self):
    with mock.patch.object(type(self.applied.mesh), "is_dp_leader", return_value=True):
        CLIP(self)


def first_micro(self, micro, logits):
    LOSS(self, 0, logits)


CLIP, LOSS = loss_by_source.LossBySource.clip, loss_by_source.LossBySource.loss
BUGS: dict[str, Any] = {"stages are left out": ("clip", no_stages), "ranks count twice": ("clip", every_rank)}
BUGS["the labels of another micro-batch"] = ("loss", first_micro)


@pytest.fixture(scope="module")
def alone(plait_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, *plait_ranks.run(trained, config(folder, {}, 1), folder, world=1)[0]


def off(rows, alone):
    """The largest relative distance of a source's loss from that of one process."""
    names = ("loss/a", "loss/b", "loss")
    return max(abs(mine[name] / other[name] - 1) for mine, other in zip(rows, alone, strict=True) for name in names)


def test_one_process_has_what_logits_say(alone):
    _, rows, by_hand = alone
    assert {name: rows[0][f"loss/{name}"] for name in by_hand} == pytest.approx(by_hand, rel=BOUND)
    assert rows[0]["loss/a"] != rows[0]["loss/b"]
    assert "epoch/a" in rows[0]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name in MORE else ()) for name in LAYOUTS]
)
def test_every_layout_agrees_with_one_process(plait_ranks, alone, layout):
    folder, rows, _ = alone
    world, strategies = LAYOUTS[layout]
    found = plait_ranks.run(trained, config(folder, strategies, world), folder, world=world)[0][0]
    assert off(found, rows) < BOUND


@pytest.mark.parametrize("layout", ["tensor_parallel", pytest.param("pipeline and fsdp2", marks=pytest.mark.slow)])
def test_a_loss_by_chunks_is_divided_among_sources_too(plait_ranks, alone, layout):
    folder, rows, _ = alone
    world, strategies = LAYOUTS[layout]
    found = plait_ranks.run(trained, config(folder, strategies, world, *CHUNKS), folder, world=world)[0][0]
    assert off(found, rows) < BOUND


@pytest.mark.slow  # what it would miss is what the test above would
@pytest.mark.parametrize(
    ("bug", "layout"),
    [
        ("stages are left out", "pipeline and fsdp2"),
        ("ranks count twice", "tensor_parallel"),
        ("the labels of another micro-batch", "fsdp2"),
    ],
)
def test_bugs_are_seen(plait_ranks, alone, bug, layout):
    folder, rows, _ = alone
    world, strategies = LAYOUTS[layout]
    found = plait_ranks.run(trained, config(folder, strategies, world), folder, bug, world=world)[0][0]
    assert off(found, rows) > 1e-3
