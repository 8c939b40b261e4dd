"""What a start makes of a run's folder that was damaged: it goes on, or one sentence says why not; no row is lost."""

import copy
import json
import os
import shutil
from pathlib import Path

import attrs
import pytest

from plait.check.prepare import prepare
from plait.checkpoint.choose import choose_on_ranks
from plait.checkpoint.files import digest
from plait.checkpoint.store import Manifest, Store
from plait.checkpoint.sums import write_sums
from plait.contract.errors import PlaitError
from plait.host import check, compose
from plait.records.metrics import FILE, OLD, MetricsFile, MetricsSeal, read
from plait.records.run_folder import Outcome, RunFolder

TINY = ["model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=16", "run.name=a"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A run of 40 steps, checked once."""
    monkey = pytest.MonkeyPatch()
    monkey.setenv("PLAIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield check(compose([*TINY, "train.steps=40", "launch.device=cpu"]))
    monkey.undo()


def put(store, step, shapes, node, **more):
    whole = store.temporary(step)
    whole.mkdir(parents=True)
    (whole / "tensors").write_bytes(bytes([step]) * 100)
    parameters = {name: (shape, "float32") for name, shape in shapes.items()}
    files = {"tensors": (100, digest(whole / "tensors"))}
    return store.commit(whole, Manifest(step, config=node, parameters=parameters, files=files, **more))


@pytest.fixture
def run(tmp_path, checked):
    """A run that was killed in step 13, with checkpoints of steps 5 and 10."""
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.path.mkdir(parents=True)
    folder.write_config(checked.config.plain())
    folder.write_versions({"python": "3"})
    folder.set_outcome(Outcome("stopped", "by hand", step=12))
    for step in (5, 10):
        put(Store(folder.path / "checkpoints"), step, checked.shapes, checked.config.plain())
    file = MetricsFile(folder.path / FILE)
    for step in range(1, 13):
        file.log({"step": step, "loss": 1 / step})
    file.close()
    return folder.path


@pytest.fixture
def start(run, checked):
    """What a start under these options of `checkpoint` and `train` says, up to where ranks would start."""

    def start(steps=40, optimizer=None, **options):
        changed = checked.config.with_value("train.steps", steps)
        for key, value in options.items():
            changed = changed.with_value(f"checkpoint.{key}", value)
        folder, said = RunFolder(run), []
        try:
            if optimizer:
                changed = changed.with_value("optimizer", optimizer)
            assembly = copy.copy(checked.assembly)
            assembly.run = attrs.evolve(assembly.run, config=changed)
            ended = prepare(attrs.evolve(checked, assembly=assembly), folder, said.append)
        finally:
            folder.unlock()
        return [*said, ended.reason] if ended else said

    return start


@pytest.fixture
def refused(run, start):
    """The sentence of a start that is refused and leaves all as it was."""

    def contents():
        found = {p: p.read_bytes() if p.is_file() else None for p in sorted(run.rglob("*"))}
        return {path: found[path] for path in found if path.name not in (".lock", "ranks")}

    def refused(**options):
        before = contents()
        with pytest.raises(PlaitError) as error:
            start(**options)
        assert contents() == before
        assert "\n" not in str(error.value)
        return str(error.value)

    return refused


def step(run, number):
    return run / "checkpoints" / f"step-{number}"


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def test_a_sound_run_goes_on(run, start):
    assert f"checkpoint: resuming after step 10 from {step(run, 10)}" in start()
    assert not any(line.startswith(("skipping", "metrics:")) for line in start())


# Checkpoints


def test_when_all_are_damaged_it_does_not_start_over(run, start, refused, checked):
    cut(step(run, 5) / "tensors")
    (step(run, 10) / "manifest.json").unlink()
    sentence = (
        f"no checkpoint in {run}/checkpoints is sound: step-10: it has no manifest.json, so it was not written "
        "completely; step-5: its file tensors has 99 bytes instead of 100; move or remove what is "
        "there to start over, set another run.name, or name a sound one with checkpoint.load=PATH"
    )
    assert refused() == sentence
    assert refused(init_from="nowhere") == sentence
    assert "would start over beside 2 checkpoint(s)" in refused(load="never")
    assert "cannot be loaded: its file tensors has 99 bytes instead of 100" in refused(load=str(step(run, 5)))
    other = put(Store(run.parent / "b"), 8, checked.shapes, checked.config.plain())
    said = start(load=str(other))
    assert f"checkpoint: resuming after step 8 from {other}" in said
    assert any(line.startswith(f"no checkpoint in {run}/checkpoints is sound: step-10: ") for line in said)
    shutil.rmtree(run / "checkpoints")
    assert "checkpoint: none to resume; starting at step 0" in start()


def test_its_own_come_before_a_named_one_and_it_says_so(run, start, checked):
    other = put(Store(run.parent / "b"), 30, checked.shapes, checked.config.plain())
    said = start(load=str(other))
    assert f"checkpoint: resuming after step 10 from {step(run, 10)}" in said
    assert f"checkpoint.load={other} is not used, because the run has its own checkpoints" in said


def test_what_is_skipped_is_said_by_the_launcher_or_by_ranks_that_started_again(run, checked, monkeypatch):
    (step(run, 10) / "manifest.json").unlink()
    folder, said = RunFolder(run), []
    for count, lines in (("0", 0), ("1", 1)):
        store = Store(run / "checkpoints")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert choose_on_ranks(checked.config.checkpoint, store, folder, said.append) == step(run, 5)
        assert len(said) == lines


def test_ranks_that_start_over_say_so(run, checked, monkeypatch):
    for step_folder in (run / "checkpoints").iterdir():
        shutil.rmtree(step_folder)
    store, folder, said = Store(run / "checkpoints"), RunFolder(run), []
    for enabled in (True, False):
        conf = attrs.evolve(checked.config.checkpoint, enabled=enabled)
        for count in ("0", "1"):  # at the first start the launcher says it
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            assert choose_on_ranks(conf, store, folder, said.append) is None
    assert said == 2 * ["checkpoint: there is none to resume; all ranks start over at step 0"]


def test_a_copy_under_another_step_is_named_and_not_taken(run, start, refused):
    shutil.copytree(step(run, 5), step(run, 999))
    said = start()
    assert f"skipping the checkpoint {step(run, 999)}: it is the checkpoint of step 5, copied or renamed" in said
    assert f"checkpoint: resuming after step 10 from {step(run, 10)}" in said
    for number in (5, 10):
        shutil.rmtree(step(run, number))
    assert "step-999: it is the checkpoint of step 5, copied or renamed; " in refused()


def of_another_format(folder):
    body = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**body, "format": 3}))


def of_a_later_plait(folder):
    body = json.loads((folder / "manifest.json").read_text())
    del body["digest"]
    from plait.checkpoint.store import _digest_of

    body["shards"] = 3
    (folder / "manifest.json").write_text(json.dumps({**body, "digest": _digest_of(body)}))


def of_two_saves(folder):
    (folder / "tensors").write_bytes((folder.with_name("step-5") / "tensors").read_bytes() + b"more")


def with_another_manifest(folder):
    shutil.copy(folder.with_name("step-5") / "manifest.json", folder / "manifest.json")


def a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("notes")


def linked_in_a_circle(folder):
    shutil.rmtree(folder)
    folder.symlink_to(folder)


def a_pipe(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def nested(folder):
    (folder / "manifest.json").write_text("[" * 100_000)


NO_CHECKPOINTS = {
    of_another_format: "its format is 3, and this version of Plait reads 2",
    of_a_later_plait: "its manifest.json holds something that this version of Plait does not write: "
    "it has the key 'shards'",
    of_two_saves: "its file tensors has 104 bytes instead of 100",
    with_another_manifest: "it is the checkpoint of step 5, copied or renamed",
    a_file: "it is not a folder",
    linked_in_a_circle: "it is not a folder",
    a_pipe: "it has no manifest.json, so it was not written completely",
    nested: "its manifest.json is broken",
}


@pytest.mark.parametrize("act", NO_CHECKPOINTS, ids=lambda act: act.__name__)
def test_what_is_no_sound_checkpoint_is_named_and_the_one_before_taken(run, start, act):
    act(step(run, 10))
    said = start()
    assert f"skipping the checkpoint {step(run, 10)}: {NO_CHECKPOINTS[act]}" in said
    assert f"checkpoint: resuming after step 5 from {step(run, 5)}" in said


def test_a_manifest_that_is_a_link_is_as_good_as_what_it_names(run, start):
    manifest = step(run, 10) / "manifest.json"
    manifest.rename(run / "manifest.json")
    manifest.symlink_to(run / "manifest.json")
    assert f"checkpoint: resuming after step 10 from {step(run, 10)}" in start()
    (run / "manifest.json").unlink()
    assert f"checkpoint: resuming after step 5 from {step(run, 5)}" in start()


def test_one_of_another_model_is_refused(run, refused, checked):
    put(Store(run / "checkpoints"), 20, {**checked.shapes, "norm.weight": (3,)}, checked.config)
    assert "the checkpoint of step 20 is of another model: 'norm.weight' has shape (3,) there and (16,)" in refused()


def test_one_of_another_optimizer_is_refused_before_anything_changes(run, start, refused, checked):
    import torch

    from plait.checkpoint.save import Saver

    state = {f"model.{name}": torch.zeros(shape) for name, shape in checked.shapes.items()}
    for name, shape in checked.shapes.items():
        state |= {f"optimizer.{name}.{key}": torch.zeros(shape) for key in ("exp_avg", "exp_avg_sq")}
        state[f"optimizer.{name}.step"] = torch.zeros(())
    Saver(Store(run / "checkpoints"), "sync", keep=9).save(state, 20, config=checked.config.plain())
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
    assert refused(optimizer=sgd) == (
        f"the checkpoint {step(run, 20)} is of another optimizer: for 'tok_embeddings.weight' it has "
        "exp_avg, exp_avg_sq, step, but this run's optimizer has momentum_buffer"
    )
    for name in ("Adam", "AdamW"):
        said = start(optimizer={"_target_": f"torch.optim.{name}", "lr": 0.1})
        assert any("resuming after step 20" in line for line in said)


def test_other_versions_are_said(run, start, checked):
    put(Store(run / "checkpoints"), 20, checked.shapes, checked.config.plain(), versions={"torch": "9.9", "gone": "1"})
    (line,) = [line for line in start() if "versions differ" in line]
    assert line.startswith("checkpoint: these versions differ from the checkpoint's: torch: 9.9 -> 2.")
    assert "gone" not in line


def test_left_overs_are_removed_whatever_they_are(run, start):
    checkpoints = run / "checkpoints"
    (checkpoints / "step-20.tmp").write_text("a file")
    (checkpoints / "step-20.old").symlink_to(step(run, 5))
    (checkpoints / "step-25.tmp").mkdir()
    (checkpoints / "step-best.tmp").mkdir()  # not ours
    assert f"checkpoint: resuming after step 10 from {step(run, 10)}" in start()
    assert {p.name for p in checkpoints.iterdir()} == {"step-5", "step-10", "step-best.tmp"}
    assert (step(run, 5) / "tensors").exists()


def test_a_folder_of_checkpoints_that_is_none_is_refused(run, start, refused):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("a file")
    other = "set checkpoint.dir to use another folder"
    assert refused() == f"the checkpoints in {run}/checkpoints cannot be read: Not a directory; {other}"
    (run / "checkpoints").unlink()
    (run / "checkpoints").symlink_to(run / "unmounted")
    assert refused() == f"the checkpoints in {run}/checkpoints cannot be read: No such file or directory; {other}"


def test_without_checkpoints_it_does_not_start_over_what_has_some(run, start, refused):
    off = {"enabled": False}
    assert refused(**off) == (
        f"checkpoint.enabled=false would start over beside 2 checkpoint(s), the last {step(run, 10)}: "
        "set another run.name, or remove them"
    )
    cut(step(run, 10) / "tensors")
    (step(run, 5) / "manifest.json").unlink()
    assert "beside 2 checkpoint(s)" in refused(**off)
    shutil.rmtree(run / "checkpoints")
    assert refused(**off, steps=11) == (
        f"checkpoint.enabled=false would start over, and the metrics in {run} reach step 12, past train.steps=11: "
        "set another run.name, or move metrics.jsonl away"
    )
    assert f"metrics: those of an earlier start move to {OLD}" in start(**off, steps=12)


def test_in_another_folder_of_checkpoints_it_does_not_start_over(run, start, refused, tmp_path):
    assert refused(dir=str(tmp_path / "other")) == (
        f"checkpoint.dir={tmp_path}/other holds no checkpoint of this run, which has 2, the last {step(run, 10)}: "
        "move them there, set checkpoint.dir=checkpoints, or set another run.name"
    )
    shutil.move(run / "checkpoints", tmp_path / "other")
    assert any("step-10" in line for line in start(dir=str(tmp_path / "other"), steps=11))


FINISHED = "a is finished at step 10: raise train.steps, or set another run.name"


def test_a_run_is_finished_when_its_weights_are_exported(run, start):
    reason = FINISHED
    assert reason not in start(steps=10)
    assert reason in start(steps=10, export=False)
    (run / "export").mkdir()
    (run / "export/notes").touch()
    assert reason not in start(steps=10)
    (run / "export/model.safetensors").touch()
    assert reason in start(steps=10)
    assert reason not in start(steps=11)
    write_sums(run / "export")
    assert reason in start(steps=10)
    (run / "export/model.safetensors").write_bytes(b"other weights")
    said = start(steps=10)
    assert reason not in said
    assert any(line.startswith("export: ") and "the run writes its weights again" in line for line in said)


# Metrics


def test_damage_of_the_rows_of_a_finished_run_is_not_passed_over(run, start, refused):
    whole = b"".join(lines(run)[:10])
    for torn in (b"\xf6\xff", b'{"step": 11, "lo'):
        (run / FILE).write_bytes(whole + torn)
        said = start(steps=10, export=False)
        assert said[-2:] == [f"metrics: the end of {FILE} was not a row of this run, and is cut", FINISHED]
        assert (run / FILE).read_bytes() == whole
    (run / FILE).write_bytes(whole + b"\xf6\n\xff")
    assert f"line 11 of {run / FILE} is damaged" in refused(steps=10, export=False)
    (run / FILE).unlink()
    assert start(steps=10, export=False) == [f"metrics: {FILE} has only 0 rows of the 10 steps before", FINISHED]
    (run / FILE).write_bytes(whole[:-1])  # complete, but for its end
    assert start(steps=10, export=False) == [FINISHED]


def lines(run):
    return (run / FILE).read_bytes().splitlines(keepends=True)


def write(run, content):
    (run / FILE).write_bytes(b"".join(content))


def test_rows_past_the_checkpoint_and_a_torn_line_are_no_damage(run, start):
    write(run, [*lines(run), b'{"step": 13, "lo'])
    start()
    assert MetricsFile(run / FILE).resume(10) == 10
    assert [row["step"] for row in read(run / FILE)] == list(range(1, 11))


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00\n", b"{}\n", b"[" * 100_000 + b"\n", b'{"step": true}\n', b"\n"],
    ids=["binary", "no step", "nested", "true", "empty"],
)
@pytest.mark.parametrize("number", [1, 4, 12])
def test_a_damaged_line_is_named(run, refused, number, content):
    rows = lines(run)
    rows[number - 1] = content
    write(run, rows)
    assert refused() == (
        f"line {number} of {run / FILE} is damaged: it holds no row of metrics with a step; "
        "repair it, or move it away if the run may continue without its rows"
    )


def test_rows_out_of_order_or_twice_are_put_right(run, start):
    before = lines(run)
    write(run, [*before[6:], *before[:6], *before[2:4]])
    start()
    assert MetricsFile(run / FILE).resume(10) == 10
    assert lines(run) == before[:10]
    write(run, before)


def test_two_rows_of_one_step_that_differ_are_refused(run, refused):
    write(run, [*lines(run), b'{"step": 3, "loss": 7.5}\n'])
    assert refused().startswith(f"{run / FILE} has two rows of step 3 that differ; repair it, or ")


def test_rows_that_are_missing_are_said(run, start):
    write(run, [*lines(run)[:3], *lines(run)[8:]])
    assert f"metrics: {FILE} has only 5 rows of the 10 steps before" in start()
    (run / FILE).unlink()
    assert f"metrics: {FILE} has only 0 rows of the 10 steps before" in start()


def test_a_run_that_starts_over_keeps_the_rows_of_before(run, start):
    shutil.rmtree(run / "checkpoints")
    before = (run / FILE).read_bytes()
    for times in (1, 2):
        assert f"metrics: those of an earlier start move to {OLD}" in start()
        assert MetricsFile(run / FILE).resume(0) == 0
        assert (run / FILE).read_bytes() == b""
        assert (run / OLD).read_bytes() == times * before
        assert not any(line.startswith("metrics:") for line in start())
        (run / FILE).write_bytes(before)


# What else lies in the folder


@pytest.mark.parametrize("name", ["config.yaml", "versions.json", "outcome.json"])
def test_files_that_every_start_writes_may_be_damaged(run, start, checked, name):
    for content in (b"", b"\xff\xfe{[", b"[" * 100_000):
        (run / name).write_bytes(content)
        assert RunFolder(run).outcome() is None or name != "outcome.json"
        assert f"checkpoint: resuming after step 10 from {step(run, 10)}" in start()
    assert RunFolder(run).read_config() == checked.config.plain()
    assert RunFolder(run).outcome() is None
    assert "torch" in RunFolder(run).read_versions()


@pytest.mark.parametrize("name", ["config.yaml", "versions.json", "outcome.json", FILE, OLD])
def test_a_folder_in_place_of_a_file_is_refused(run, refused, name):
    Path(run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    (run / name / "inside").touch()
    assert refused() == f"{run / name} is not a file: move or remove it, or set another run.name"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("name", ["config.yaml", FILE, "ranks/rank-0.log", "ranks/rank-1.end.json"])
def test_a_pipe_in_place_of_a_file_is_refused(run, refused, name):
    Path(run / name).unlink(missing_ok=True)
    (run / "ranks").mkdir(exist_ok=True)
    os.mkfifo(run / name)
    assert refused() == f"{run / name} is not a file: move or remove it, or set another run.name"


@pytest.fixture
def sealed(run, checked):
    """The same run, whose last checkpoint vouches for the rows up to its step."""
    path = run / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:10]))
    seal = MetricsSeal(path).now()
    path.write_bytes(b"".join(lines))
    put(Store(run / "checkpoints"), 10, checked.shapes, checked.config.plain(), data={"metrics": seal})
    return path


def test_a_digit_that_changed_in_a_row_is_refused(sealed, start, refused):
    content = sealed.read_bytes()
    assert any("resuming after step 10" in line for line in start())
    sealed.write_bytes(content.replace(b'"step": 4, "loss": 0.25', b'"step": 4, "loss": 0.35'))
    assert "up to step 10 were changed after they were written (sha256 differs)" in refused()
    sealed.write_bytes(content.replace(b'"loss": 0.08', b'"loss": 0.09'))  # of step 12, which will be made again
    assert any("resuming after step 10" in line for line in start())


def test_what_a_resumed_run_rewrites_is_what_was_sealed(sealed, start):
    MetricsFile(sealed).resume(10)
    assert any("resuming after step 10" in line for line in start())
    assert len(read(sealed)) == 10


def test_a_seal_follows_a_file_that_grows(tmp_path):
    path = tmp_path / FILE
    seal = MetricsSeal(path)
    assert seal.now() is None
    for content in (b"one\n", b"two\n" * 1000):
        with path.open("ab") as file:
            file.write(content)
        assert seal.now() == MetricsSeal(path).now() == [path.stat().st_size, digest(path)]
