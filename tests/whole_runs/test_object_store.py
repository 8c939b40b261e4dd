"""Whole runs with their checkpoints in an object store that is slow, goes away, or sees its run killed."""

import json

import pytest

from tests.helpers import one_rank
from tests.helpers.commands import kill_all, numbers, plait, start, train
from tests.helpers.object_server import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN = ("strategy=[fsdp2]", "run.name=a", "checkpoint.dir=s3://runs/a", "validation.interval=0", "train.steps=20")


@pytest.fixture
def server():
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def in_a_folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("folder")
    done = train(*RUN[:2], *RUN[3:], cwd=here)
    assert done.code == 0, done
    return here / "runs" / "a"


def same(run, other):
    assert numbers(run) == numbers(other)
    assert (run / "export/model.safetensors").read_bytes() == (other / "export/model.safetensors").read_bytes()


def steps(server, whole):
    """Of the prefixes that have a manifest, or of those that have none."""
    names = [name.partition("/") for name in server.names("a/") if name.startswith("step-")]
    complete = {prefix for prefix, _, name in names if name == "manifest.json"}
    return complete if whole else {prefix for prefix, _, _ in names} - complete


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_that_is_killed_in_the_middle_of_an_upload(server, in_a_folder, tmp_path, mode):
    run = start(*RUN, f"checkpoint.mode={mode}", cwd=tmp_path, **server.env)
    server.waits(lambda: "step-5" in steps(server, True))
    server.gate.slow = 0.5
    server.waits(lambda: steps(server, False) & {"step-10", "step-15"})
    kill_all(run, tmp_path / "runs" / "a")
    run.wait()
    assert (half := steps(server, False))
    server.gate.slow = 0.0
    done = train(*RUN, f"checkpoint.mode={mode}", cwd=tmp_path, **server.env)
    assert done.code == 0, done
    assert f"checkpoint: resuming after step {int(min(half)[5:]) - 5} from s3://runs/a/step-" in done.out
    same(tmp_path / "runs" / "a", in_a_folder)
    assert steps(server, True) == {"step-15", "step-20"}
    assert steps(server, False) == set()
    export = tmp_path / "runs/a/export"
    assert server.names("a/export/") == sorted(file.name for file in export.iterdir())
    copy = server.client.get_object(Bucket="runs", Key="a/export/model.safetensors")["Body"].read()
    assert copy == (export / "model.safetensors").read_bytes()
    said = plait("sample", "s3://runs/a", "def ", "tokens=2", "temperature=0", cwd=tmp_path, **server.env)
    assert "model: s3://runs/a/step-20, step 20" in said.err, said


def test_a_store_that_goes_away_for_a_while_and_for_good(server, in_a_folder, tmp_path):
    run = start(*RUN, cwd=tmp_path, **server.env)
    server.waits(lambda: "step-5" in steps(server, True))
    server.gate.slow = 0.5
    server.waits(lambda: steps(server, False) & {"step-10"})
    server.gate.shut()
    before = []
    while "trying again" not in (line := run.stdout.readline()):
        assert line, before
        before.append(line)
    server.gate.slow = 0.0
    server.gate.open()
    out = "".join([*before, line, run.communicate()[0]])
    assert run.returncode == 0, out
    assert "the store cannot be reached" in out
    assert "trying again for up to 60 s, while training goes on" in out
    same(tmp_path / "runs" / "a", in_a_folder)
    server.gate.shut()
    done = train(*RUN, "train.steps=24", cwd=tmp_path, **server.env)
    assert done.code == 1, done
    assert done.err.count("plait: ") == 1
    assert "s3://runs/a" in done.err
    assert "the store cannot be reached" in done.err


def test_a_stream_from_an_address_gives_what_a_file_gives_and_resumes(server, tmp_path):
    text = "".join(json.dumps({"text": f"document {i} " + "words and more " * (i * 7 % 13)}) + "\n" for i in range(600))
    (tmp_path / "t.jsonl").write_text(text)
    server.client.put_object(Bucket="runs", Key="t.jsonl", Body=text.encode())
    stream = ("data=hf", "data.name=json", "data.validation_documents=0", "validation.interval=0")
    more = (*stream, "schedule.min_lr_ratio=1", "checkpoint.export=false")
    done = one_rank.train(*more, f"data.data_files={tmp_path / 't.jsonl'}", "run.name=b", cwd=tmp_path)
    assert done.code == 0, done
    for steps_now in (7, 20):
        there = ("data.data_files=s3://runs/t.jsonl", "checkpoint.dir=s3://runs/a", "run.name=a")
        done = one_rank.train(*more, *there, f"train.steps={steps_now}", cwd=tmp_path, **server.env)
        assert done.code == 0, done
    assert "checkpoint: resumed after step 7" in done.out
    assert numbers(tmp_path / "runs" / "a") == numbers(tmp_path / "runs" / "b")


def test_two_runs_at_one_address_and_a_lost_folder(server, tmp_path):
    """A run elsewhere is refused; the same run goes on without the folder that was lost with its machine."""
    (tmp_path / "lost").mkdir()
    where = ("checkpoint.dir=s3://runs/a", "run.name=a")
    assert one_rank.train(*where, "train.steps=10", cwd=tmp_path / "lost", **server.env).code == 0
    (tmp_path / "b").mkdir()
    done = one_rank.train(*where, cwd=tmp_path / "b", **server.env)
    assert done.code == 1, done
    assert "checkpoint.dir=s3://runs/a holds the checkpoints of the run in" in done.err
    assert not (tmp_path / "b" / "runs").exists()
    (tmp_path / "lost/runs/a").rename(tmp_path / "kept")
    done = one_rank.train(*where, cwd=tmp_path / "lost", **server.env)
    assert done.code == 0, done
    assert "checkpoint: resuming after step 10 from s3://runs/a/step-10" in done.out
    assert "metrics.jsonl has only 0 rows of the 10 steps before" in done.out
