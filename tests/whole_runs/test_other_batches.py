"""A run resumed at other batch sizes and on other ranks goes on at the next sample: proven by the samples' tokens."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from plait.check.prepare import prepare
from plait.check.resumed_data import check_data, with_batch_of
from plait.checkpoint.store import Manifest, Store
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.host import check, compose
from plait.records.run_folder import RunFolder
from plait.testing import raises_about
from plait_data.hf import Hf
from plait_data.text import Text
from plait_testing import whole_run
from tests.helpers.recorded import in_a_row, noted, rows

RECORDED = "tests.helpers.recorded.Recorded"
TINY = [
    *("model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=16"),
    *("train.seq_len=16", "validation.interval=0", "checkpoint.export=false", "metrics.tensorboard=false"),
    *("launch.device=cpu", "schedule.warmup_steps=2", "run.name=a", "checkpoint.mode=sync", "checkpoint.interval=100"),
]


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def text(tmp_path):
    """Documents for 41 samples of 16 tokens: a short epoch."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} " + "plait " * (i % 7)}) + "\n" for i in range(32)))
    return path


def packed(text, notes):
    options = {"path": str(text), "text_key": "text", "validation_fraction": 0, "notes": str(notes)}
    return ["data=text", f"data._target_={RECORDED}Text", *(f"++data.{k}={v}" for k, v in options.items())]


def stream(text, notes):
    options = {"name": "json", "data_files": str(text), "shuffle_buffer": 5, "validation_documents": 0}
    found = {**options, "notes": str(notes)}
    return ["data=hf", f"data._target_={RECORDED}Hf", *(f"++data.{k}={v}" for k, v in found.items())]


def ready(folder, *overrides, world=1):
    """(what was said, the config that ranks read): as far as `plait train` goes before a rank starts."""
    said = []
    with contextlib.chdir(folder):
        strategy = "strategy=[fsdp2]" if world > 1 else "strategy=[]"
        checked = check(compose([*TINY, strategy, *overrides]), world)
        run = RunFolder(folder / "runs" / "a")
        try:
            assert prepare(checked, run, said.append) is None
        finally:
            run.unlock()
        checked.source.prepare(said.append)
    return said, Config.of(run.read_config())


def trained(ranks, folder, *overrides, world=1):
    """The same, and trained by ranks of the pool; returns also the rows of metrics.jsonl."""
    said, node = ready(folder, *overrides, world=world)
    return said, ranks.run(whole_run.run, node, folder / "runs" / "a", world=world)[0]


def test_epochs_are_counted_in_samples_whatever_the_batch(plait_ranks, tmp_path, notes, text):
    """41 samples are one: 5 a step up to half of them, then 12 a step up to one and a half."""
    data = packed(text, notes)
    five = ("train.local_batch_size=5", "schedule.warmup_steps=5")
    said, half = trained(plait_ranks, tmp_path, *data, *five, "train.epochs=0.5")
    assert [row["epoch"] * 41 for row in half] == pytest.approx([5, 10, 15, 20])
    assert any(line.startswith("schedule: all 4 steps are warm-up") for line in said)
    batch = ("train.local_batch_size=3", "train.global_batch_size=12", "train.epochs=1.5")
    _, whole = trained(plait_ranks, tmp_path, *data, *batch, world=2)
    assert [row["epoch"] * 41 for row in whole] == pytest.approx([32, 44, 56, 68])
    with contextlib.chdir(tmp_path), contextlib.ExitStack() as stack:
        run = RunFolder(tmp_path / "runs" / "a")
        stack.callback(run.unlock)
        ended = prepare(check(compose([*TINY, "strategy=[]", *data, *five, "train.epochs=1.5"]), 1), run, print)
    assert ended is not None
    assert ended.reason == "a is finished at step 8: raise train.epochs, or set another run.name"


def test_packed_samples_go_on_in_a_row_whatever_the_batch(plait_ranks, tmp_path, notes, text):
    """1 rank, then 2 with a larger global batch, then 3 that keep it, over the end of an epoch."""
    data, taken = packed(text, notes), []
    _, first = trained(plait_ranks, tmp_path, *data, "train.local_batch_size=5", "train.steps=3")
    taken += in_a_row(noted(notes, 1))
    batch = ("train.local_batch_size=3", "train.global_batch_size=12")
    said, second = trained(plait_ranks, tmp_path, *data, *batch, "train.steps=5", world=2)
    assert "data: the global batch was 5 samples and is 12 from sample 15 on" in said
    taken += in_a_row(noted(notes, 2))
    assert len(taken) == 39
    with raises_about("train.global_batch_size", 12):
        ready(tmp_path, *data, "train.local_batch_size=3", "train.steps=8", world=8)
    said, third = trained(plait_ranks, tmp_path, *data, "train.local_batch_size=3", "train.steps=8", world=3)
    assert (
        "data: the checkpoint's global batch of 12 samples is kept, in 2 local batch(es) of 2 per rank; "
        "train.global_batch_size sets another"
    ) in said
    taken += in_a_row(noted(notes, 3))
    assert len(taken) == 75
    source = Text(path=str(text), validation_fraction=0)
    undisturbed = source.open(seq_len=16, seed=0, global_batch_size=75, dp=(0, 1))
    assert 39 < len(undisturbed._train) < 75, "the third part must span two epochs"
    assert taken == rows(undisturbed.train(0))
    counted = [row["tokens"] // 16 for part in (first, second, third) for row in part]
    assert counted == [5, 10, 15, 27, 39, 51, 63, 75]
    manifest = Store.read(tmp_path / "runs/a/checkpoints/step-8")
    assert (manifest.data["samples"], manifest.tokens) == (75, 75 * 16)


@pytest.mark.slow
def test_every_part_of_a_stream_goes_on_whatever_the_batch_and_the_ranks(
    plait_ranks, tmp_path, notes, text, monkeypatch
):
    """Each takes up its own place."""
    data, taken = stream(text, notes), [[], []]
    store = Store(tmp_path / "runs/a/checkpoints")
    for steps, batch, world in ((3, 4, 2), (5, 12, 1), (6, 2, 2)):
        options = ("train.local_batch_size=1", f"train.global_batch_size={batch}", f"train.steps={steps}")
        _, got = trained(plait_ranks, tmp_path, *data, *options, world=world)
        for share, batches in zip(taken, noted(notes, 2), strict=True):
            share += [row for part in batches for row in part]
    assert got[-1]["tokens"] == 38 * 16
    assert Store.read(store.path_of(6)).data["samples"] == 38
    monkeypatch.setattr("plait_data.stream.DEPTH", 8)
    for index, share in enumerate(taken):
        whole = Hf(name="json", data_files=str(text), shuffle_buffer=5, validation_documents=0)
        undisturbed = whole.open(seq_len=16, seed=0, global_batch_size=38, dp=(index, 2))
        assert share == rows(undisturbed.train(0)), f"share {index}"
    assert taken[0] != taken[1]
    more = (*data, "train.local_batch_size=1", "train.steps=9")
    said, config = ready(tmp_path, *more, "train.global_batch_size=6", world=3)
    assert config.train.data_parts == 2
    assert not any("data_parts" in line for line in said)
    with raises_about("train.global_batch_size", 9, "a multiple of 2"):
        ready(tmp_path, *more, "train.global_batch_size=9", world=3)
    with raises_about("train.data_parts", 3, (None, 2)):
        ready(tmp_path, *more, "train.data_parts=3", "train.global_batch_size=6", world=3)
    with raises_about("train.global_batch_size", 4, "a multiple of 3"):
        ready(tmp_path, *more, "run.name=b", "train.data_parts=3", "train.global_batch_size=4", world=2)


# What a start says of a checkpoint before a rank runs


def resumed(manifest, shares, indexable=True, **options):
    """(what was said, global batch, local batch) of a run on so many data ranks that goes on from `manifest`."""
    said, config = [], Config.of({"train": {"seq_len": 16, "local_batch_size": 2, **options}})
    source, layout = SimpleNamespace(indexable=indexable), SimpleNamespace(count={"batch": shares, "sequence": 7}.get)
    check_data(manifest, SimpleNamespace(config=config, layout=layout, source=source))
    train = with_batch_of(manifest, config, shares, said.append).train
    return said, train.global_batch_size, train.local_batch_size


def saved(**data):
    return Manifest(5, config={"train": {"seq_len": 16, "seed": 0}}, data={"shares": 2, **data})


@pytest.mark.parametrize(
    ("size", "shares", "local", "kept"),
    [
        (4, 1, 4, 4),  # fewer ranks, but the batch that null gives
        (4, 1, 2, 2),  # by accumulation
        (4, 4, 2, 1),  # more ranks: smaller local batches
        (12, 2, 4, 3),  # the largest part that divides
        (7, 1, 4, 1),
        (20, 4, 3, 1),
    ],
)
def test_null_keeps_the_global_batch_on_other_ranks(size, shares, local, kept):
    said, *batch = resumed(saved(global_batch_size=size), shares, local_batch_size=local)
    assert batch == [size, kept]
    parts = f"in {size // shares // kept} local batch(es) of {kept} per rank; train.global_batch_size sets another"
    line = f"data: the checkpoint's global batch of {size} samples is kept, {parts}"
    assert said == ([] if size == local * shares else [line])


def test_a_batch_that_cannot_be_kept_says_what_to_set():
    manifest = saved(global_batch_size=4, samples=20)
    with raises_about("train.global_batch_size", 4, (3, 6)):
        resumed(manifest, 3, local_batch_size=1)
    assert resumed(manifest, 3, local_batch_size=1, global_batch_size=6) == (
        ["data: the global batch was 4 samples and is 6 from sample 20 on"], 6, 1
    )  # fmt: skip


@pytest.mark.parametrize(("key", "before", "now"), [("seq_len", 16, 8), ("seed", 0, 1)])
def test_other_samples_are_refused(key, before, now):
    with raises_about(f"train.{key}", now, (before,)):
        resumed(saved(global_batch_size=4), 2, **{key: now})


def test_a_stream_does_not_begin_in_the_middle():
    with pytest.raises(PlaitError, match="was not trained on a stream, so it holds no position in one"):
        resumed(saved(global_batch_size=4, samples=20), 2, indexable=False)


def test_a_stream_goes_on_in_its_own_parts():
    manifest = saved(global_batch_size=4, samples=20, states=[{"start": 1}, {"start": 2}])
    for shares in (1, 2, 4):
        assert resumed(manifest, shares, indexable=False, data_parts=2)[1] == 4
    with raises_about("train.data_parts", 4, (None, 2)):
        resumed(manifest, 4, indexable=False, data_parts=4)
    with raises_about("train.global_batch_size", 9, "a multiple of 2"):
        resumed(manifest, 3, indexable=False, global_batch_size=9)


def test_what_another_loop_saved_asks_for_nothing():
    assert resumed(Manifest(5), 3) == ([], None, 2)


@pytest.mark.slow
def test_a_mixture_goes_on_with_other_weights_by_saying_so(plait_ranks, tmp_path, notes, text):
    """On two ranks in place of one, from the next sample of each source on: as a run of both weights from the start."""
    (tmp_path / "b.txt").write_text("".join(f"rope {i} " for i in range(90)))
    held = "validation_fraction: 0"
    nodes = f"{{a: {{kind: text, {held}, path: {text}}}, b: {{kind: text, {held}, path: {tmp_path / 'b.txt'}}}}}"
    steady = ("train.global_batch_size=4", "schedule.min_lr_ratio=1")  # the rate must not depend on the last step
    was, now = "data.weights={a: 2, b: 1}", "data.weights={a: 1, b: 3}"
    given = ("data=mix", f"data.sources={nodes}", "train.local_batch_size=2", *steady)
    trained(plait_ranks, tmp_path, *given, was, "train.steps=3")
    with raises_about("data.change_weights", False, (True,)):
        ready(tmp_path, *given, now, "train.steps=6")
    changed = ("data.change_weights=true", "train.steps=6")
    said, found = trained(plait_ranks, tmp_path, *given, now, *changed, world=2)
    history = Config.of(RunFolder(tmp_path / "runs" / "a").read_config()).data["history"]
    assert history == [[12, {"weights": {"a": 2, "b": 1}}]]
    assert any("data.weights.a: 2 -> 1" in line for line in said)
    other = tmp_path / "other"
    other.mkdir()
    whole = trained(plait_ranks, other, *given, now, "train.steps=6", "data.history=[[12,{weights:{a:2,b:1}}]]")[1]
    for name in ("loss", "loss/a", "loss/b", "epoch/a"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in whole[3:]], rel=1e-5)
