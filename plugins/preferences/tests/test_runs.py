"""Whole runs on pairs: the reference is the weights at the start, in every layout and after a resume."""

import json
import math
import signal
import sys

import cloudpickle
import pytest

from plait.check.resumed_data import local_batch
from plait.host import check, compose
from plait_testing import whole_run
from tests.helpers.chats import CHATS, tokenizer_in

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

BOUND = 1e-9  # of a row's values, in float64
STEPS = 3
COLUMNS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy")
TINY = ("train.seq_len=64", "model.n_layers=2", "model.dim=16", "model.ffn_dim=16", "model.vocab_size=400")
VALIDATED = ("validation.interval=2", "validation.batches=1", "data.validation_fraction=0.2", "optimizer.lr=0.01")


def pairs(folder):
    """Twenty pairs of conversations that differ in the last answer."""
    path = folder / "pairs.jsonl"
    rows = [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [{"role": "assistant", "content": f"no {number}"}]}
        for number, chat in enumerate(CHATS[:20])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIT_CACHE", str(folder / "cache"))
        tokenizer_in(folder / "tokenizer")
        pairs(folder)
        yield folder


def config(home, strategies, world, *more, steps=STEPS):
    given = whole_run.overrides(strategies, home, world, *TINY)
    given = [one for one in given if not one.startswith("data")]
    own = ("data=pairs", f"data.path={home}/pairs.jsonl", f"data.tokenizer={home}/tokenizer", "loss=dpo")
    node = check(compose([*given, *own, *VALIDATED, f"data.cache_dir={home}/cache", *more]), world).config
    for key in ("param", "storage", "reduce"):
        node = node.with_value(f"precision.{key}", "float64")
    return node.with_value("train.steps", steps)


def off(rows, alone):
    columns = (*COLUMNS, "val_loss")
    both = [(mine[c], its[c]) for mine, its in zip(rows, alone, strict=True) for c in columns if c in its]
    return max(abs(mine - its) / max(abs(its), 1e-3) for mine, its in both)


def rows_of(node, folder):
    """The rows of a run in `folder`, which goes on if it has a checkpoint."""
    (folder / "versions.json").write_text("{}")
    return whole_run.run(node, folder)


@pytest.fixture(scope="module")
def alone(plait_ranks, home, tmp_path_factory):
    return plait_ranks.run(rows_of, config(home, {}, 1), tmp_path_factory.mktemp("alone"), world=1)[0]


def test_at_first_nothing_is_preferred_to_the_reference(alone):
    rows = alone
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert abs(rows[0]["rewards/margin"]) < 1e-12
    assert rows[-1]["rewards/margin"] > 1e-3
    assert "val_loss" in rows[1]
    assert "slowest_rank" not in rows[0], "of one rank none is the slowest"


LAYOUTS = {
    "fsdp2": ({"fsdp2": {}}, 2),
    "pipeline and fsdp2": ({"pipeline": {"degree": 2}, "fsdp2": {}}, 4),
    "context_parallel and tensor_parallel": (
        {"context_parallel": {"degree": 2}, "tensor_parallel": {"degree": 2}, "fsdp2": {}},
        4,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_rows_of_one_process(plait_ranks, home, alone, tmp_path, layout):
    strategies, world = LAYOUTS[layout]
    found = plait_ranks.run(rows_of, config(home, strategies, world), tmp_path, world=world)[0]
    assert off(found, alone) < BOUND


def test_a_resumed_run_has_the_reference_of_its_start(plait_ranks, home, alone, tmp_path):
    """Two steps on two ranks, then the third on one, whose weights have moved by then."""
    both = config(home, {"fsdp2": {}}, 2, "checkpoint.interval=2", steps=2)
    assert off(plait_ranks.run(rows_of, both, tmp_path, world=2)[0], alone[:2]) < BOUND
    found = plait_ranks.run(rows_of, config(home, {}, 1), tmp_path, world=1)[0]
    assert [row["step"] for row in found] == [3]
    assert off(found, alone[2:]) < BOUND


@pytest.mark.slow
def test_rows_without_a_reference_are_refused(plait_ranks, home, tmp_path):
    """As many rows of other data, more steps, more to validate on."""
    small = ("train.local_batch_size=2", "train.global_batch_size=2", "checkpoint.interval=2")
    plait_ranks.run(rows_of, config(home, {}, 1, *small, steps=2), tmp_path, world=1)
    lines = (home / "pairs.jsonl").read_text().splitlines()
    (home / "other.jsonl").write_text("".join(f"{line}\n" for line in reversed(lines)))
    refused = {
        "other data than these": config(home, {}, 1, *small, f"data.path={home}/other.jsonl"),
        "with train.steps and the global batch": config(home, {}, 1, *small, steps=4),
        "with validation.batches and the global batch": config(home, {}, 1, *small, "validation.batches=2", steps=2),
    }
    for sentence, node in refused.items():
        with pytest.raises(Exception, match=sentence):
            plait_ranks.run(rows_of, node, tmp_path, world=1)


def evaluated(node, checkpoint, size, whole):
    from plait_use.evaluate import evaluate

    return evaluate(node, checkpoint, size, whole)


def test_an_evaluation_compares_with_the_weights_at_the_start(plait_ranks, home, tmp_path):
    """It has the loss of the run's own validation, and of a whole set the same by any batch and layout."""
    pytest.importorskip("plait_use")
    held = "data.validation_fraction=0.6"
    node = config(home, {"fsdp2": {}}, 2, "checkpoint.interval=2", held, steps=2)
    row = plait_ranks.run(rows_of, node, tmp_path, world=2)[0][-1]
    path, size = str(tmp_path / "checkpoints/step-2"), node.train.global_batch_size
    loss, count = plait_ranks.run(evaluated, node, path, size, False, world=2)[0][""]
    assert loss / count == pytest.approx(row["val_loss"], rel=1e-9)
    loss, count = plait_ranks.run(evaluated, node, path, 12, True, world=2)[0][""]
    alone, pairs = plait_ranks.run(evaluated, config(home, {}, 1, held), path, 2, True, world=1)[0][""]
    assert pairs == count
    assert count % 6
    assert loss == pytest.approx(alone, rel=1e-9)


def stopped(node, folder):
    """(how a run ended that rank 1 alone is asked to stop with the reference half computed, the rank's forwards)."""
    import torch.distributed as dist

    from plait import RunObserver
    from plait.host import RunFolder
    from plait.train.trainer import Trainer

    forwards: list[int] = []

    class Asks(RunObserver):
        def doing(self, what):
            if what.startswith("reference, batch 2 ") and dist.get_rank() == 1:
                trainer.ask_to_stop(signal.SIGTERM)

    (folder / "versions.json").write_text("{}")
    trainer = Trainer(node, RunFolder(folder), lambda line: None, [Asks()])
    trainer.restore()
    trainer.parts[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    return trainer.fit(), trainer.step, trainer.stopped_by, len(forwards)


def test_a_signal_is_heard_before_the_reference_is_whole(plait_ranks, home, tmp_path):
    node = config(home, {"fsdp2": {}}, 2, "train.local_batch_size=2", "train.global_batch_size=4", steps=20)
    for kind, step, number, forwards in plait_ranks.run(stopped, node, tmp_path, world=2):
        assert (kind, step, number, forwards) == ("stopped", 0, signal.SIGTERM, 1)
    assert not [*(tmp_path / "checkpoints").glob("*")]


@pytest.mark.parametrize(("rows", "expected"), [(6, 2), (4, 4), (12, 4)])
def test_a_local_batch_parts_no_pair(home, rows, expected):
    """Six rows of a rank by at most four at once are three times two, not two times three."""
    assert local_batch(config(home, {}, 1, "train.local_batch_size=4"), rows) == expected


@pytest.mark.slow
def test_with_lora_the_reference_is_the_base(plait_ranks, home, tmp_path):
    lora = {"lora": {"rank": 2, "random_base": True}, "fsdp2": {}}
    first, *_, last = plait_ranks.run(rows_of, config(home, lora, 2), tmp_path, world=2)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert last["rewards/margin"] > 1e-4
