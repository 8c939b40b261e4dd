"""What a user can mistype: one sentence before any rank starts, no traceback, and a disk as it was."""

import math
import os
import re
import sys
from pathlib import Path

import pytest

from plait.system.errors import one_line
from plait.testing import is_about
from plait_testing.errors import ANY
from plait_testing.project import STARTED
from tests.helpers.commands import SMALL
from tests.helpers.commands import plait as plait_command

FSDP = "strategy=[fsdp2]"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")


@pytest.fixture(autouse=True)
def _folder(plait_project, monkeypatch):
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # without a name server
    monkeypatch.setattr("plait.launch.meeting.LAST_WORDS", 0.1)  # no other machine comes to hear the refusal
    Path("empty.txt").touch()
    Path("nothing").mkdir()
    Path("text.txt").write_text("a text that is long enough " * 400)


def contents():
    found = (path for path in Path().rglob("*") if "__pycache__" not in path.parts)  # Python's own, of imported files
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def error_of(plait_project, *arguments, command="train"):
    before = contents()
    done = plait_project(command, *(("launch.device=cpu", *arguments) if command == "train" else arguments))
    assert done.code == 1, done
    assert done.err == f"plait: {one_line(done.error)}\n"
    assert contents() == before
    return done.error


INSTALLED = ("fsdp2", "tensor_parallel")
DEGREE, NPROC, FORM = "at least 1, or -1 for what is left", "a whole number or 'auto'", "HOST:PORT"
SHARDS = ("shard", "replicate", "cpu_offload")
ELASTIC = "launch.nproc_per_node=1 launch.rdzv_endpoint='[::1]:29500' launch.nnodes=1"
MOST, HERE, ENDPOINT = "<= 31622400", "can be found", "launch.nnodes=2 launch.rdzv_endpoint="
CASES = {  # arguments -> the key at fault, its value, what would fit
    # what does not exist
    "strategy=[fsdp]": ("strategy", "fsdp", INSTALLED),
    "strategy=[fsdp2,tensr]": ("strategy", "tensr", INSTALLED),
    "+strategy.ghost.x=1": ("strategy", "ghost", INSTALLED),
    "strategy.fsdp2.shard=2": ("strategy.fsdp2", None),
    "model=lama3_debug": ("model", "lama3_debug", ("llama3_8b", "llama3_debug")),
    "data=stdlb": ("data", "stdlb", ("hf", "stdlib", "text")),
    "+recipe=fdsp2": ("recipe", "fdsp2", ("fsdp2",)),
    "recipe=sft": ("recipe", "sft", "+recipe=sft"),
    "hardware=": ("hardware", "", "+hardware=NAME"),
    "~recipe": ("recipe", None),
    "+model=llama3_debug": ("model", None),
    "+cluster=h100": ("cluster", None),
    "train.stpes=3": ("train.stpes", None, ("steps", "seq_len")),
    "+train.stpes=3": ("train.stpes", None, ("steps", "seq_len")),
    "trian.steps=3": ("trian", None, ("train", "optimizer")),
    "+foo=1": ("foo", None, ("run", "strategy")),
    f"{FSDP} strategy.fsdp2.shrad=2": ("strategy.fsdp2.shrad", None, SHARDS),
    f"{FSDP} +strategy.fsdp2.shrad=2": ("strategy.fsdp2.shrad", None, SHARDS),
    "model.dims=3": ("model.dims", None, ("dim", "n_layers")),
    "+model.dims=3": ("model.dims", None, ("dim", "n_layers")),
    "model._target_=nowhere.Model": ("model._target_", "nowhere.Model"),
    "model._target_=collections.Counter": ("model._target_", "collections.Counter", "a torch module"),
    "optimizer._target_=torch.optim.Adma": ("optimizer._target_", "torch.optim.Adma"),
    "+optimizer.lrr=3": ("optimizer.lrr", None, ("lr", "betas")),
    "cluster=h100 cluster.device=x": ("cluster.device", "x", ("cuda", "cpu")),
    # what is not an override at all
    "train.steps": ("train.steps", None, "key=value"),
    "train.steps=[1": ("train.steps=[1", None, "key=value"),
    "strategy=null": ("strategy", None, "strategy=[NAME]"),
    "strategy=": ("strategy", None, "[]"),
    "schedule=cosine": ("schedule", "cosine"),
    "loss=": ("loss", None, "~loss"),
    "loss=null": ("loss", None, "~loss"),
    "train.steps=${nope}": ("train.steps", None),
    # values
    "train.steps=many": ("train.steps", "many", "a whole number"),
    "train.steps=0": ("train.steps", 0, ">= 1"),
    "train.epochs=0": ("train.epochs", 0, "> 0"),
    "data=hf data.name=text data.data_files=README.md train.epochs=2": ("train.epochs", 2, (None,)),
    "train=3": ("train", 3, "a node with the keys steps, epochs, seq_len, "),
    "checkpoint.keep_best=true validation.interval=0": ("validation.interval", 0, "at least 1"),
    "validation.patience=2 checkpoint.enabled=false": ("checkpoint.enabled", False, (True,)),
    "precision.param=fp16": ("precision.param", "fp16", ("float32", "float64", "bfloat16")),
    "precision.optimizer=fp8": ("precision.optimizer", "fp8", ("bfloat16", "8bit")),
    "precision.rounding=stochastic": ("precision.rounding", "stochastic", "precision.storage=bfloat16"),
    "train.skip=1": ("train.skip", 1, "> 1"),
    "schedule.decay_steps=-3": ("schedule.decay_steps", -3, ">= 0"),
    f"{FSDP} strategy.fsdp2.reshard_after_forward=maybe": (
        *("strategy.fsdp2.reshard_after_forward", "maybe", ("always", "never")),
    ),
    "run.name=../x": ("run.name", "../x", "a plain name"),
    "compile.enabled=true compile.backend=inductr": ("compile.backend", "inductr", ("aot_eager", "inductor")),
    "profile.enabled=true profile.ranks=[1]": ("profile.ranks", [1], "0 to 0"),
    "profile.enabled=true profile.memory=true": ("profile.memory", True, (False,)),
    "profile.enabled=true profile.start=500": ("profile.start", 500, "at most 140"),
    "optimizer.lr=fast": ("optimizer.lr", "fast", "a number"),
    # degrees and batches
    f"{FSDP} strategy.fsdp2.shard=3 launch.nproc_per_node=4": ("world", 4, "exactly 3"),
    f"{FSDP} strategy.fsdp2.replicate=3": ("world", 2, "a multiple of 3"),
    f"{FSDP} strategy.fsdp2.shard=0": ("strategy.fsdp2.shard", 0, DEGREE),
    f"{FSDP} strategy.fsdp2.replicate=-1": ("dp_shard", -1, "a degree of its own"),
    "launch.nproc_per_node=2": ("world", 2, "exactly 1"),
    f"{FSDP} train.local_batch_size=2 train.global_batch_size=6": ("train.global_batch_size", 6, (4, 8)),
    "model.n_heads=7": ("model.n_heads", 7, (8,)),
    "train.seq_len=4096": ("train.seq_len", 4096, "at most 2048"),
    # data
    "data=text": ("data.path", None),
    "data=text data.path=text.tx": ("data.path", "text.tx", ("text.txt",)),
    "data=text data.path=empty.txt": ("data.path", "empty.txt"),
    "data=text data.path=nothing": ("data.path", "nothing"),
    "data=text data.path=s3://runs/t.jsonl": ("data.path", "s3://runs/t.jsonl", ("a file, a folder or a glob",)),
    "data.tokenizer=nope": ("data.tokenizer", "nope", "'bytes', a file or a folder"),
    "model.vocab_size=100": ("model.vocab_size", 100, "at least 257"),
    "data.validation_fraction=0": ("validation.interval", 40, (0,)),
    # checkpoints
    "checkpoint.load=lastest": ("checkpoint.load", "lastest"),
    "checkpoint.load=nothing": ("checkpoint.load", "nothing"),
    "checkpoint.memory_steps=0": ("checkpoint.memory_steps", 0, ">= 1"),
    "checkpoint.memory_steps=-3": ("checkpoint.memory_steps", -3, ">= 1"),
    "checkpoint.memory_steps=1.5": ("checkpoint.memory_steps", 1.5),
    "checkpoint.memory_steps=41": ("checkpoint.memory_steps", 41, "at most 40"),
    "checkpoint.memory_steps=5 checkpoint.enabled=false": ("checkpoint.memory_steps", 5, (None,)),
    # ranks and machines
    "launch.mode=external": ("launch.mode", "external", ("local",)),
    "launch.mode=torchrun": ("launch.mode", "torchrun", ("local",)),
    "launch.mode=slrum": ("launch.mode", "slrum", ("auto", "local", "external", "slurm", "torchrun")),
    f"{FSDP} launch.nproc_per_node=100000": ("launch.nproc_per_node", 100000, "at most "),
    f"{FSDP} launch.nproc_per_node={10**18}": ("launch.nproc_per_node", 10**18, "at most "),
    f"{FSDP} strategy.fsdp2.shard=4096": ("launch.nproc_per_node", 4096, "at most "),
    "launch.nproc_per_node=true": ("launch.nproc_per_node", True, NPROC),
    "launch.nproc_per_node=2.5": ("launch.nproc_per_node", 2.5, NPROC),
    "launch.nproc_per_node=-1": ("launch.nproc_per_node", -1, "of at least 1"),
    "launch.nproc_per_node=0": ("launch.nproc_per_node", 0, "of at least 1"),
    "launch.nproc_per_node=null": ("launch.nproc_per_node", None, NPROC),
    "launch.nproc_per_node=two": ("launch.nproc_per_node", "two", NPROC),
    "launch.grace_seconds=inf": ("launch.grace_seconds", math.inf, MOST),
    "launch.grace_seconds=nan": ("launch.grace_seconds", ANY, "a number"),
    "launch.timeout_seconds=nan": ("launch.timeout_seconds", ANY, "a number"),
    "launch.timeout_seconds=0": ("launch.timeout_seconds", 0.0, "> 0"),
    "launch.timeout_seconds=1e300": ("launch.timeout_seconds", 1e300, MOST),
    "launch.nnodes=0": ("launch.nnodes", 0, ">= 1"),
    "launch.nnodes=two": ("launch.nnodes", "two", "a whole number, or MIN:MAX"),
    "launch.nnodes=0:2": ("launch.nnodes", "0:2", ">= 1"),
    "launch.nnodes=2:1": ("launch.nnodes", "2:1", "MIN < MAX"),
    "launch.nnodes=2:2": ("launch.nnodes", "2:2", "MIN < MAX"),
    "launch.nnodes=1:2:3": ("launch.nnodes", "1:2:3", "a whole number, or MIN:MAX"),
    f"{FSDP} {ELASTIC}:3 train.global_batch_size=16": ("launch.nnodes", "1:3", (1, 2)),
    f"strategy=[tensor_parallel,fsdp2] {ELASTIC}:3": ("launch.nnodes", "1:3", (2,)),
    f"{FSDP} launch.nnodes=2": ("launch.rdzv_endpoint", None, FORM),
    f"{FSDP} {ENDPOINT}node0": ("launch.rdzv_endpoint", "node0", FORM),
    f"{FSDP} {ENDPOINT}29500": ("launch.rdzv_endpoint", 29500, "text (in quotes)"),
    f"{FSDP} {ENDPOINT}'29500'": ("launch.rdzv_endpoint", "29500", FORM),
    f"{FSDP} {ENDPOINT}':29500'": ("launch.rdzv_endpoint", ":29500", FORM),
    f"{FSDP} {ENDPOINT}'node0:'": ("launch.rdzv_endpoint", "node0:", FORM),
    f"{FSDP} {ENDPOINT}'tcp://a:80'": ("launch.rdzv_endpoint", "tcp://a:80", FORM),
    f"{FSDP} {ENDPOINT}localhost:0": ("launch.rdzv_endpoint", "localhost:0", "from 1 to 65535"),
    "launch.rdzv_endpoint=localhost:99999": ("launch.rdzv_endpoint", "localhost:99999", "from 0 to 65535"),
    f"{FSDP} {ENDPOINT}no..host:29500": ("launch.rdzv_endpoint", "no..host:29500", HERE),
    f"{FSDP} {ENDPOINT}nosuch.invalid:29500": ("launch.rdzv_endpoint", "nosuch.invalid:29500", HERE),
}
NAMED = """
optimizer.lr optimizer.lr=inf
optimizer.betas optimizer.betas=[true,0.9]
optimizer.betas optimizer.betas=[0.9]
optimizer.betas optimizer.betas=0.9
optimizer optimizer.betas=[1.5,0.9]
optimizer.fused optimizer.fused=maybe
optimizer._target_ optimizer._target_=torch.nn.Linear
train.steps train.steps=true
train.seed train.seed=1.7
train.max_norm train.max_norm=nan
train.seq_len train.seq_len=1000000000000
train.local_batch_size train.local_batch_size=1000000000
model.dim model.dim=1000000000000
model model.dim=1000000000
model.n_layers model.n_layers=1000000000
model.n_heads model.dim=1000000000 model.n_heads=7
model.rope_scaling model.rope_scaling=5
model.rope_scaling model.rope_scaling={factor:2}
model._target_ model._target_=os.system
model._target_ model._target_=os.abort
model._target_ model._target_=sys.exit
model._target_ model._target_=plait
model._target_ model._target_=[a]
model._partial_ +model._partial_=true
model._convert_ +model._convert_=nope
model model=[llama3_debug,qwen3_debug]
model model=../model/llama3_debug
data._target_ data._target_=os.system
data._target_ data=hf data.name=a data._target_=builtins.dict
data._partial_ +data._partial_=true
data.cache_dir data.cache_dir=relative
data.cache_dir data.cache_dir=[1]
data.tokenizer data.tokenizer=/dev/zero
data.tokenizer data.tokenizer=null
data.path data=text data.path=/dev/zero
data.path data=text data.path=[a,b]
data.follow_links data=text data.path=. data.follow_links=1
data.name data=hf data.name=5
checkpoint.load checkpoint.load=/dev/zero
/dev/zero checkpoint.init_from=/dev/zero
checkpoint.init_from checkpoint.init_from=
nowhere checkpoint.init_from=nowhere
nothing checkpoint.init_from=nothing
checkpoint.dir checkpoint.dir=../../elsewhere
checkpoint.dir checkpoint.dir=ranks
hydra.output_subdir hydra.output_subdir=../../elsewhere
hydra.run.dir hydra.run.dir=../elsewhere
hydra.job.chdir hydra.job.chdir=true
hydra.sweep.dir hydra.sweep.dir=../elsewhere
hydra.sweep.subdir hydra.sweep.subdir=/elsewhere
run.name run.name=1.10
run.name run.name=--help
run.name run.name='a\x1b[31mb'
strategy strategy=[fsdp2,fsdp2]
strategy strategy=[[fsdp2]]
strategy.fsdp2 strategy=[fsdp2] ~strategy.fsdp2
strategy.fsdp2 strategy=[fsdp2] strategy.fsdp2=5
strategy.simplefsdp.passes strategy=[simplefsdp] strategy.simplefsdp.passes=[a]
profile.ranks profile.enabled=true profile.ranks=[]
remat.mode remat.mode=budget
train.steps +train.steps=5
train.steps ++train.steps.x=5
train.steps train.steps=${
train.steps train.steps==5
train.steps train.steps=1,2
+recipe=fsdp2 recipe=fsdp2
nowhere --config-dir nowhere
nope --config-name nope
--nope --nope
--cfg --cfg=nope
"""
LINES = [line.split(" ") for line in NAMED.strip().splitlines()]  # what the sentence names, the arguments
LINES += [["override", ""], ["run.name", "run.name='a\nb'"], ["data.path", "data=text", f"data.path={'a' * 5000}"]]


@pytest.mark.parametrize("arguments", CASES)
def test_what_is_at_fault(plait_project, arguments):
    is_about(error_of(plait_project, *arguments.split()), *CASES[arguments])


@pytest.mark.slow
@pytest.mark.parametrize(("key", "arguments"), [(key, given) for key, *given in LINES], ids=lambda it: str(it)[:40])
def test_what_is_named(plait_project, key, arguments):
    assert key in str(error_of(plait_project, *arguments))


@pytest.mark.parametrize(
    "good",
    [
        (FSDP, "launch.timeout_seconds=31622400", "launch.grace_seconds=0.5", "launch.rdzv_endpoint=localhost:0"),
        (FSDP, "launch.nnodes=2", "launch.rdzv_endpoint='[::1]:29500'"),
    ],
)
def test_a_good_command_would_start(plait_project, good):
    """Else all of the above might fail for another reason."""
    assert plait_project("train", "launch.device=cpu", *good).code == STARTED


def test_the_sentence_that_is_printed_is_the_errors_own_and_no_debugger_changes_it(plait_project):
    error, before = error_of(plait_project, "train.stpes=3"), sys.gettrace()
    assert str(error) == f"unknown key train.stpes; available: {', '.join(error.fits)}; did you mean 'steps'?"
    sys.settrace(lambda *_: None)
    try:
        assert str(error_of(plait_project, "train.stpes=3")) == str(error)
    finally:
        sys.settrace(before)


def test_nothing_but_the_sentence_comes_out_of_a_process(plait_project):
    done = plait_command("train", *SMALL, FSDP, "trian.steps=3", cwd=Path())
    assert (done.code, done.out) == (1, "")
    assert done.err == f"plait: {error_of(plait_project, *SMALL, FSDP, 'trian.steps=3')}\n"
    assert not Path("runs").exists()


def test_other_commands_are_as_strict(plait_project):
    many = error_of(plait_project, "world=many", command="inspect")
    is_about(many, "world", "many", "a number of ranks, at least 1")
    degree = error_of(plait_project, FSDP, "strategy.fsdp2.shard=4", "world=6", command="inspect")
    is_about(degree, "world", 6, "exactly 4")
    is_about(error_of(plait_project, "strategy=[fsdp]", command="inspect"), "strategy", "fsdp", INSTALLED)
    mode = error_of(plait_project, "launch.mode=slrum", "launch.device=cpu", command="inspect")
    is_about(mode, "launch.mode", "slrum", ("auto", "slurm"))
    assert plait_project("inspect", FSDP, "launch.nnodes=2", "launch.nproc_per_node=512", "launch.device=cpu").code == 0
    too_many = error_of(plait_project, FSDP, "train.seq_len=8", "world=5000", "launch.device=cpu", command="verify")
    is_about(too_many, "launch.nproc_per_node", 5000, "at most ")


@pytest.mark.parametrize(
    ("code", "conf", "sentence"),
    [
        ("", "dim: [1\n", r"ParserError: .*mine\.yaml"),
        ("class Broken:\n    def __init__(self):\n        assert False\n", "_target_: mine.Broken\n", "AssertionError"),
    ],
    ids=["no YAML", "cannot be made"],
)
def test_a_users_own_model_that_is_broken(plait_project, code, conf, sentence):
    Path("mine.py").write_text(code)
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text(conf)
    assert re.search(sentence, str(error_of(plait_project, "model=mine")))
