"""`plait eval`: the loss of validation, in every layout, from any checkpoint."""

import json
import math
import re
import tempfile
from types import SimpleNamespace

import pytest
import torch

from plait import PlaitError, apply
from plait.host import Outcome, RunFolder, build_model, build_source, check, compose, fit, load
from plait_use.evaluate import batch_of, evaluate, on_held_out, once, takes_all
from plait_use.trained import find

MODELS = {
    "dense": ["model=llama3_debug", "model.dim=32", "model.ffn_dim=48", "model.n_layers=2", "model.n_heads=4"],
    "experts": ["model=deepseek_v3_debug"],
}
LAYOUTS = {
    "fsdp2": ("dense", ["strategy=[fsdp2]"], 2),
    "tensor_parallel": ("dense", ["strategy=[tensor_parallel]"], 2),
    "context_parallel": ("dense", ["strategy=[context_parallel,fsdp2]"], 2),
    "pipeline": ("dense", ["strategy=[pipeline]"], 2),
    "alone": ("experts", ["strategy=[]"], 1),
    "expert_parallel": ("experts", ["strategy=[expert_parallel,fsdp2]"], 2),
}
QUICK = ("fsdp2", "tensor_parallel", "pipeline")


def options(folder, kind):
    """Of a run in float64 with two sets to validate on."""
    sets = "{" + ", ".join(f"{name}: {folder / name}.txt" for name in ("rising", "falling")) + "}"
    return [
        *(*MODELS[kind], "data=text", f"data.path={folder / 'train.txt'}", f"data.validation_path={sets}"),
        *(
            "precision.storage=float64",
            "precision.param=float64",
            "precision.reduce=float64",
            "checkpoint.export=false",
        ),
        *("train.steps=2", "train.seq_len=64", "train.local_batch_size=2", "train.global_batch_size=4"),
        *("validation.interval=2", "validation.batches=2", "optimizer.lr=0.05", f"run.name={kind}"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, plait_ranks):
    """A folder with a run of each model, trained under fsdp2, and the texts."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "cache").mkdir()
    texts = {
        "train": range(600),
        "rising": range(900, 1500),
        "falling": range(900, 300, -1),
        "other": range(7, 7000, 9),
    }
    for name, numbers in texts.items():
        (folder / f"{name}.txt").write_text(" ".join(map(str, numbers)))
    for kind in MODELS:
        made = RunFolder(folder / "runs" / kind)
        made.path.mkdir(parents=True)
        made.write_versions({})
        rows = plait_ranks.run(trained, made.path, options(folder, kind), world=2)[0]
        made.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(folder, options):
    config = compose([*options, "strategy=[fsdp2]"])
    RunFolder(folder).write_config(config.plain())
    seen = SimpleNamespace(rows=[])
    seen.row = seen.rows.append
    fit(config, folder, [seen])
    return seen.rows


def evaluated(path, overrides):
    found = find(str(path), overrides)
    config = on_held_out(found.config, overrides)
    world = torch.distributed.get_world_size()
    whole = takes_all(overrides)
    return evaluate(config, str(found.checkpoint), batch_of(found, check(config, world), whole), whole)


@pytest.mark.parametrize(("interval", "then"), [(0, 1), (50, 50)])
def test_an_evaluation_of_a_run_that_never_validated_validates(interval, then):
    config = on_held_out(compose(["strategy=[]", f"validation.interval={interval}"]), [])
    assert config.validation.interval == then


@pytest.mark.parametrize("layout", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_every_layout_has_the_loss_of_training(layout, runs, plait_ranks):
    kind, strategy, world = LAYOUTS[layout]
    row = json.loads((runs / "runs" / kind / "metrics.jsonl").read_text().splitlines()[-1])
    sums = plait_ranks.run(evaluated, runs / "runs" / kind, strategy, world=world)
    assert all(each == sums[0] for each in sums)
    assert {name: tokens for name, (_, tokens) in sums[0].items()} == {"rising": 512, "falling": 512}
    for name, (loss, tokens) in sums[0].items():
        assert loss / tokens == pytest.approx(row[f"val_loss/{name}"], rel=1e-12)
    assert row["val_loss/rising"] != pytest.approx(row["val_loss/falling"], rel=1e-3)


def by_hand(path, file):
    """(the mean loss of a plain model on all samples of 64 tokens of a file, by torch alone, their number)."""
    found = find(str(path), [])
    config = found.config
    applied = apply(*build_model(config.model), precision=config.precision)
    load(found.checkpoint, applied.checkpoint()[0])
    source = build_source({**config.data, "path": str(file), "validation_path": None, "validation_fraction": 0.0})
    count = source.open(seq_len=64, seed=0, global_batch_size=1, dp=(0, 1)).epoch
    batch = source.open(seq_len=64, seed=0, global_batch_size=count, dp=(0, 1)).take(0)
    with torch.no_grad():
        logits = applied.parts[0].eval()(batch.tokens)
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())), count


def test_other_data_are_taken_whole(runs, plait_ranks):
    """data.path alone names what is held out, and nothing of it is left to train on. Each sample counts once, also if
    the batches do not divide them."""
    other = f"data.path={runs / 'other.txt'}"
    ((expected, count),) = plait_ranks.run(by_hand, runs / "runs/dense", runs / "other.txt", world=1)
    assert count % 4
    for more, world in (
        ([], 2),
        (["strategy=[context_parallel,fsdp2]", "train.local_batch_size=5"], 2),
        (["strategy=[]"], 1),
    ):
        (loss, tokens) = plait_ranks.run(evaluated, runs / "runs/dense", [other, *more], world=world)[0][""]
        assert tokens == count * 64
        assert loss / tokens == pytest.approx(expected, rel=1e-12)


def test_of_other_data_so_many_batches_are_taken(runs):
    assert not takes_all(["data.path=a", "validation.batches=3"])
    assert not takes_all(["train.local_batch_size=3"])
    assert takes_all(["data=text", "+data.validation_path={a: b}"])


def test_what_is_printed(runs, plait_project, monkeypatch):
    monkeypatch.chdir(runs)
    row = json.loads((runs / "runs/dense/metrics.jsonl").read_text().splitlines()[-1])
    told = plait_project("eval", "dense", "strategy=[]", ranks=1)
    assert told.code == 0, told.err
    head, *figures, last = [line.split() for line in told.out.splitlines()[-4:]]
    assert head == ["loss", "perplexity", "tokens"]
    assert [each[0] for each in figures] == ["rising", "falling"]
    loss = row["val_loss"]
    assert last == ["all", f"{loss:.4f}", f"{math.exp(loss):.4g}", "1,024"]


def test_how_ranks_end_is_how_it_ends(runs, plait_project, monkeypatch, tmp_path):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the log of what failed stays
    stopped = plait_project("eval", "dense", ranks=lambda *_: Outcome("stopped", "asked to", signal=15))
    assert stopped.code == 128 + 15
    failed = plait_project("eval", "dense", ranks=lambda *_: Outcome("failed", "made to fail", rank=1))
    assert failed.code == 1
    assert re.search(r"plait: made to fail \(rank 1; its log: .+/rank-1\.log\)$", failed.err.strip())
    assert len([*tmp_path.iterdir()]) == 1


REFUSED = {
    "a run that is not there": (["dens"], "did you mean 'dense'?"),
    "a file that is not there": (["dense", "data.path=gone.txt"], "gone.txt"),
    "nothing held out": (["dense", "data=stdlib", "data.validation_fraction=0"], "no data is held out"),
    "an unknown key": (["dense", "data.paths=a"], "unknown key data.paths"),
    "a batch that does not divide": (["dense", "launch.nproc_per_node=3"], "does not divide among 3 data ranks"),
    "a model of another size": (["dense", "model.n_layers=3"], "is of another model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_a_rank_starts(case, runs, plait_project, monkeypatch):
    monkeypatch.chdir(runs)
    words, sentence = REFUSED[case]
    told = plait_project("eval", *words)
    (line,) = (line for line in told.err.splitlines() if not line.startswith("check: "))
    assert told.code == 1
    assert sentence in line


def test_what_both_kinds_of_data_say_is_said_once():
    said = []
    say = once(said.append)
    for line in ("left out 1 empty file(s)", "validation: left out 1 empty file(s)", "validation: 2 rows"):
        say(line)
    assert said == ["left out 1 empty file(s)", "2 rows"]


def test_a_batch_of_the_run_is_kept(runs):
    found = find(str(runs / "runs/dense"), [])
    assert batch_of(found, check(on_held_out(found.config, []), 4)) == 4
    with pytest.raises(PlaitError, match=r"train\.global_batch_size=3"):
        batch_of(found, check(on_held_out(found.config, []), 3))
