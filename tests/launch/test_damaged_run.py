"""What a start makes of a run's folder that was damaged: it goes on, or one sentence says why not; no row is lost."""

import copy
import json
import os
import shutil
from pathlib import Path

import attrs
import pytest
import torch

from plait.check.prepare import prepare
from plait.checkpoint.choose import choose_on_ranks
from plait.checkpoint.files import digest
from plait.checkpoint.save import Saver
from plait.checkpoint.store import MANIFEST, Manifest, Store, _digest_of
from plait.checkpoint.sums import write_sums
from plait.contract.errors import PlaitError
from plait.host import check, compose
from plait.records.metrics import FILE, OLD, MetricsFile, read
from plait.records.metrics_seal import MetricsSeal
from plait.records.run_folder import Outcome, RunFolder

TINY = ["model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=16", "run.name=a"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A run of 40 steps, checked once."""
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setenv("PLAIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield check(compose([*TINY, "train.steps=40", "launch.device=cpu"]))


def put(store, step, checked, *, shapes=None, **more):
    """A checkpoint of `step` in `store`, of which only the manifest is read before ranks start."""
    whole = store.temporary(step)
    whole.mkdir(parents=True)
    (whole / "tensors").write_bytes(bytes([step]) * 100)
    parameters = {name: (shape, "float32") for name, shape in (shapes or checked.shapes).items()}
    files = {"tensors": (100, digest(whole / "tensors"))}
    manifest = Manifest(step, config=checked.config.plain(), parameters=parameters, files=files, **more)
    return store.commit(whole, manifest)


def test_a_new_folder_is_the_runs_while_its_data_are_made_and_gone_if_that_fails(tmp_path, checked):
    folder = RunFolder(tmp_path / "runs" / "new")

    def make():
        with pytest.raises(PlaitError, match="is already running"):
            RunFolder(folder.path).lock()
        raise PlaitError("too little text")

    with pytest.raises(PlaitError, match="too little text"):
        prepare(checked, folder, print, make)
    assert not folder.path.exists()


def test_a_folder_that_another_start_made_meanwhile_stays(tmp_path, checked):
    folder = RunFolder(tmp_path / "runs" / "new")

    def another_trains(line):
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "its").touch()

    def make():
        raise PlaitError("too little text")

    with pytest.raises(PlaitError, match="too little text"):
        prepare(checked, folder, another_trains, make)
    assert (folder.path / "its").exists()


@pytest.fixture
def run(tmp_path, checked):
    """A run that was killed in step 13, with checkpoints of steps 5 and 10."""
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.path.mkdir(parents=True)
    folder.write_config(checked.config.plain())
    folder.write_versions({"python": "3"})
    folder.set_outcome(Outcome("stopped", "by hand", step=12))
    for step in (5, 10):
        put(Store(folder.path / "checkpoints"), step, checked)
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
        return "\n".join([*said, ended.reason] if ended else said)

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


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def resumes(run, number):
    return f"checkpoint: resuming after step {number} from {step(run, number)}"


def test_a_sound_run_goes_on(run, start):
    said = start()
    assert resumes(run, 10) in said
    assert "skipping" not in said
    assert "metrics:" not in said


# Checkpoints


def signed(folder, **changes):
    """Change its manifest, and make that right."""
    body = json.loads((folder / MANIFEST).read_text()) | changes
    del body["digest"]
    (folder / MANIFEST).write_text(json.dumps({**body, "digest": _digest_of(body)}))


def replaced(folder, by):
    shutil.rmtree(folder)
    by(folder)


def a_pipe(folder):
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


NO_CHECKPOINTS = {  # what is done to it -> why it is passed over
    lambda it: flip(it / MANIFEST): f"its {MANIFEST}",
    lambda it: (it / MANIFEST).write_text('{"step": 10'): f"its {MANIFEST} is broken",
    lambda it: (it / MANIFEST).write_text("[" * 100_000): f"its {MANIFEST} is broken",
    lambda it: (it / MANIFEST).unlink(): f"it has no {MANIFEST}",
    a_pipe: f"it has no {MANIFEST}",
    lambda it: (it / "tensors").unlink(): "its file tensors is missing",
    lambda it: (it / "tensors").write_bytes(b"short"): "its file tensors has 5 bytes instead of 100",
    lambda it: signed(it, format=3): "its format is 3, and this version of Plait reads 2",
    lambda it: signed(it, shards=3): "it has the key 'shards'",
    lambda it: replaced(it, lambda there: there.write_text("notes")): "it is not a folder",
    lambda it: replaced(it, lambda there: there.symlink_to(there)): "it is not a folder",
}


@pytest.mark.parametrize(("act", "why"), NO_CHECKPOINTS.items(), ids=NO_CHECKPOINTS.values())
def test_what_is_no_sound_checkpoint_is_named_and_the_one_before_taken(run, start, refused, act, why):
    act(step(run, 10))
    said = start()
    assert f"skipping the checkpoint {step(run, 10)}: " in said
    assert why in said
    assert resumes(run, 5) in said
    (run / "checkpoints").rename(run.parent / "other")
    named = run.parent / "other" / "step-10"
    sentence = refused(load=str(named))
    assert sentence.startswith(f"checkpoint.load={named} cannot be loaded: ")
    assert why in sentence


def test_when_all_are_damaged_it_does_not_start_over(run, start, refused, checked):
    cut(step(run, 5) / "tensors")
    (step(run, 10) / MANIFEST).unlink()
    sentence = refused()
    for part in (f"no checkpoint in {run}/checkpoints is sound", "step-10: it has no", "step-5: its file tensors has"):
        assert part in sentence
    assert refused(init_from="nowhere") == sentence
    assert "would start over beside 2 checkpoint(s)" in refused(load="never")
    assert "cannot be loaded: its file tensors has 99 bytes" in refused(load=str(step(run, 5)))
    other = put(Store(run.parent / "b"), 8, checked)
    said = start(load=str(other))
    assert f"checkpoint: resuming after step 8 from {other}" in said
    assert f"no checkpoint in {run}/checkpoints is sound: step-10: " in said
    shutil.rmtree(run / "checkpoints")
    assert "checkpoint: none to resume; starting at step 0" in start()


def test_a_copy_under_another_step_is_not_taken_even_alone(run, start, refused):
    shutil.copytree(step(run, 5), step(run, 999))
    said = start()
    assert f"skipping the checkpoint {step(run, 999)}: it is the checkpoint of step 5, copied or renamed" in said
    assert resumes(run, 10) in said
    for number in (5, 10):
        shutil.rmtree(step(run, number))
    assert "step-999: it is the checkpoint of step 5, copied or renamed; " in refused()


def test_its_own_come_before_a_named_one_and_it_says_so(run, start, checked):
    other = put(Store(run.parent / "b"), 30, checked)
    said = start(load=str(other))
    assert resumes(run, 10) in said
    assert f"checkpoint.load={other} is not used, because the run has its own checkpoints" in said


@pytest.mark.parametrize(("enabled", "found"), [(True, True), (True, False), (False, False)])
def test_ranks_that_started_again_say_what_the_launcher_said_at_first(run, checked, monkeypatch, enabled, found):
    (step(run, 10) / MANIFEST).unlink()
    if not found:
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints").mkdir()
    conf = attrs.evolve(checked.config.checkpoint, enabled=enabled)
    for count, lines in (("0", 0), ("1", 1)):
        said = []
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        chosen = choose_on_ranks(conf, Store(run / "checkpoints"), RunFolder(run), said.append)
        assert chosen == (step(run, 5) if found else None)
        assert len(said) == (lines if found else 0)


def test_a_manifest_that_is_a_link_is_as_good_as_what_it_names(run, start):
    manifest = step(run, 10) / MANIFEST
    manifest.rename(run / MANIFEST)
    manifest.symlink_to(run / MANIFEST)
    assert resumes(run, 10) in start()
    (run / MANIFEST).unlink()
    assert resumes(run, 5) in start()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda shapes: {**shapes, "norm.weight": (3,)}, "'norm.weight' has shape (3,) there and (16,) in this run"),
        (lambda shapes: {**shapes, "more.weight": (3,)}, "it has 'more.weight', which this run's model does not have"),
        (lambda shapes: {k: v for k, v in shapes.items() if k != "norm.weight"}, "it lacks 'norm.weight'"),
    ],
    ids=["shape", "more", "fewer"],
)
def test_one_of_another_model_is_refused(run, refused, checked, other, why):
    put(Store(run / "checkpoints"), 20, checked, shapes=other(checked.shapes))
    assert f"the checkpoint of step 20 is of another model: {why}" in refused()


def test_one_of_another_optimizer_is_refused_before_anything_changes(run, start, refused, checked):
    state = {f"model.{name}": torch.zeros(shape) for name, shape in checked.shapes.items()}
    for name, shape in checked.shapes.items():
        state |= {f"optimizer.{name}.{key}": torch.zeros(shape) for key in ("exp_avg", "exp_avg_sq")}
        state[f"optimizer.{name}.step"] = torch.zeros(())
    Saver(Store(run / "checkpoints"), "sync", keep=9).save(state, 20, config=checked.config.plain())
    sentence = refused(optimizer={"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9})
    assert f"the checkpoint {step(run, 20)} is of another optimizer" in sentence
    assert "exp_avg, exp_avg_sq, step, but this run's optimizer has momentum_buffer" in sentence
    for name in ("Adam", "AdamW"):
        assert "resuming after step 20" in start(optimizer={"_target_": f"torch.optim.{name}", "lr": 0.1})


def test_other_versions_are_said(run, start, checked):
    put(Store(run / "checkpoints"), 20, checked, versions={"torch": "9.9", "gone": "1"})
    (line,) = [line for line in start().splitlines() if "versions differ" in line]
    assert line.startswith("checkpoint: these versions differ from the checkpoint's: torch: 9.9 -> 2.")
    assert "gone" not in line


def test_left_overs_are_removed_whatever_they_are(run, start):
    checkpoints = run / "checkpoints"
    (checkpoints / "step-20.tmp").write_text("a file")
    (checkpoints / "step-20.old").symlink_to(step(run, 5))
    shutil.copytree(step(run, 10), checkpoints / "step-25.tmp")
    (checkpoints / "step-best.tmp").mkdir()  # not ours
    assert resumes(run, 10) in start()
    assert {p.name for p in checkpoints.iterdir()} == {"step-5", "step-10", "step-best.tmp"}
    assert (step(run, 5) / "tensors").exists()


def test_a_folder_of_checkpoints_that_is_none_is_refused(run, refused):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("a file")
    cannot = f"the checkpoints in {run}/checkpoints cannot be read: "
    assert f"{cannot}Not a directory" in refused()
    (run / "checkpoints").unlink()
    (run / "checkpoints").symlink_to(run / "unmounted")
    assert f"{cannot}No such file or directory" in refused()


def test_without_checkpoints_it_does_not_start_over_what_has_some(run, start, refused):
    sentence = refused(enabled=False)
    assert f"checkpoint.enabled=false would start over beside 2 checkpoint(s), the last {step(run, 10)}" in sentence
    cut(step(run, 10) / "tensors")
    (step(run, 5) / MANIFEST).unlink()
    assert "beside 2 checkpoint(s)" in refused(enabled=False)
    shutil.rmtree(run / "checkpoints")
    assert f"the metrics in {run} reach step 12, past train.steps=11" in refused(enabled=False, steps=11)
    assert f"metrics: those of an earlier start move to {OLD}" in start(enabled=False, steps=12)


def test_in_another_folder_of_checkpoints_it_does_not_start_over(run, start, refused, tmp_path):
    sentence = refused(dir=str(tmp_path / "other"))
    assert f"checkpoint.dir={tmp_path}/other holds no checkpoint of this run, which has 2, the last " in sentence
    shutil.move(run / "checkpoints", tmp_path / "other")
    assert "step-10" in start(dir=str(tmp_path / "other"), steps=11)


FINISHED = "a is finished at step 10: raise train.steps, or set another run.name"


def test_a_run_is_finished_when_its_weights_are_exported(run, start):
    assert FINISHED not in start(steps=10)
    assert FINISHED in start(steps=10, export=False)
    (run / "export").mkdir()
    (run / "export/notes").touch()
    assert FINISHED not in start(steps=10)
    (run / "export/model.safetensors").touch()
    assert FINISHED not in start(steps=10)  # of an earlier step, as far as anybody knows
    finished = Outcome("finished", "", step=10)
    RunFolder(run).set_outcome(finished)
    assert FINISHED in start(steps=10)
    assert FINISHED not in start(steps=11)
    write_sums(run / "export")
    RunFolder(run).set_outcome(finished)
    assert FINISHED in start(steps=10)
    (run / "export/model.safetensors").write_bytes(b"other weights")
    said = start(steps=10)
    assert FINISHED not in said
    assert "the run writes its weights again" in said


# Metrics


def lines(run):
    return (run / FILE).read_bytes().splitlines(keepends=True)


def write(run, content):
    (run / FILE).write_bytes(b"".join(content))


def test_damage_of_the_rows_of_a_finished_run_is_not_passed_over(run, start, refused):
    whole, over = b"".join(lines(run)[:10]), {"steps": 10, "export": False}
    for torn in (b"\xf6\xff", b'{"step": 11, "lo'):
        (run / FILE).write_bytes(whole + torn)
        assert start(**over).endswith(f"metrics: the end of {FILE} was not a row of this run, and is cut\n{FINISHED}")
        assert (run / FILE).read_bytes() == whole
    (run / FILE).write_bytes(whole + b"\xf6\n\xff")
    assert f"line 11 of {run / FILE} is damaged" in refused(**over)
    (run / FILE).unlink()
    assert start(**over) == f"metrics: {FILE} has only 0 rows of the 10 steps before\n{FINISHED}"
    (run / FILE).write_bytes(whole[:-1])  # complete, but for its end
    assert start(**over) == FINISHED


def test_rows_past_the_checkpoint_and_a_torn_line_are_no_damage(run, start):
    write(run, [*lines(run), b'{"step": 13, "lo'])
    start()
    assert MetricsFile(run / FILE).resume(10) == 10
    assert [row["step"] for row in read(run / FILE)] == list(range(1, 11))


BINARY, NO_STEP = b"\xff\xfe\x00\n", b"{}\n"


@pytest.mark.parametrize(
    ("number", "content"),
    [(1, BINARY), (12, BINARY), (4, NO_STEP), (4, b"[" * 100_000 + b"\n"), (4, b'{"step": true}\n'), (4, b"\n")],
    ids=["first", "last", "no step", "nested", "true", "empty"],
)
def test_a_damaged_line_is_named(run, refused, number, content):
    rows = lines(run)
    rows[number - 1] = content
    write(run, rows)
    assert refused().startswith(f"line {number} of {run / FILE} is damaged: ")


def test_rows_out_of_order_or_twice_are_put_right_unless_they_differ(run, start, refused):
    before = lines(run)
    write(run, [*before[6:], *before[:6], *before[2:4]])
    start()
    assert MetricsFile(run / FILE).resume(10) == 10
    assert lines(run) == before[:10]
    write(run, [*before, b'{"step": 3, "loss": 7.5}\n'])
    assert refused().startswith(f"{run / FILE} has two rows of step 3 that differ")


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
        assert "metrics:" not in start()
        (run / FILE).write_bytes(before)


def test_a_digit_that_changed_in_a_sealed_row_is_refused(run, start, refused, checked):
    """The last checkpoint vouches for the rows up to its step; those after it are made again."""
    path, rows = run / FILE, lines(run)
    write(run, rows[:10])
    seal = MetricsSeal(path).now()
    put(Store(run / "checkpoints"), 10, checked, data={"metrics": seal})
    whole = b"".join(rows)
    path.write_bytes(whole.replace(b'"step": 4, "loss": 0.25', b'"step": 4, "loss": 0.35'))
    assert "up to step 10 were changed after they were written (sha256 differs)" in refused()
    for content in (whole, whole.replace(b'"loss": 0.08', b'"loss": 0.09')):
        path.write_bytes(content)
        assert resumes(run, 10) in start()
    MetricsFile(path).resume(10)  # what a resumed run rewrites is what was sealed
    assert resumes(run, 10) in start()
    assert len(read(path)) == 10


def test_a_seal_follows_a_file_that_grows(tmp_path):
    path = tmp_path / FILE
    seal = MetricsSeal(path)
    assert seal.now() is None
    for content in (b"one\n", b"two\n" * 1000):
        with path.open("ab") as file:
            file.write(content)
        assert seal.now() == MetricsSeal(path).now() == [path.stat().st_size, digest(path)]


# What else lies in the folder


def test_files_that_every_start_writes_may_be_damaged(run, start, checked):
    for content in (b"", b"\xff\xfe{[", b"[" * 100_000):
        for name in ("config.yaml", "versions.json", "outcome.json"):
            (run / name).write_bytes(content)
        assert RunFolder(run).outcome() is None
        assert resumes(run, 10) in start()
    assert RunFolder(run).read_config() == checked.config.plain()
    assert "torch" in RunFolder(run).read_versions()


def a_folder(path):
    path.mkdir()
    (path / "inside").touch()


FILES = ["config.yaml", "versions.json", "outcome.json", FILE, OLD]
LOGS = ["ranks/rank-0.log", "ranks/rank-1.end.json"]


@pytest.mark.parametrize(
    ("name", "make"),
    [*((name, a_folder) for name in FILES), *((name, os.mkfifo) for name in ("config.yaml", FILE, *LOGS))],
)
def test_what_is_no_file_in_place_of_one_is_refused(run, refused, name, make):
    Path(run / name).unlink(missing_ok=True)
    (run / "ranks").mkdir(exist_ok=True)
    make(run / name)
    assert refused() == f"{run / name} is not a file: move or remove it, or set another run.name"
