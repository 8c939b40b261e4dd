"""What a user can mistype or break: one sentence before any rank starts, no traceback, and a disk as it was."""

import contextlib
import re
import shutil
from pathlib import Path

import pytest
import yaml
from commands import SMALL, rows, train
from commands import plait as plait_command
from fakes import STRATEGY, distribution, forget
from inside import STARTED, plait

from plait.checkpoint.files import digest
from plait.checkpoint.store import Manifest, Store
from plait.launch.check import check

FSDP = "strategy=[fsdp2]"


def contents():
    return {str(path): path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    Path("empty.txt").touch()
    Path("nothing").mkdir()
    Path("text.txt").write_text("a text that is long enough " * 400)


def refused(sentence, *arguments, command="train"):
    before = contents()
    done = plait(command, *(("launch.device=cpu", *arguments) if command == "train" else arguments))
    assert done.code == 1, done
    assert re.fullmatch(f"plait: {sentence}\n", done.err), done.err
    assert contents() == before
    return done


KEYS = "steps, seq_len, local_batch_size, global_batch_size, seed, deterministic, max_norm, gc_interval"
OPTIONS = "shard, replicate, reshard_after_forward, reshard_root, prefetch, cpu_offload"
CASES = {
    # what does not exist
    "strategy=[fsdp]": r"strategy=fsdp is not installed; installed: .*fsdp2.*; did you mean 'fsdp2'\?",
    "strategy=[fsdp2,tensr]": r"strategy=tensr is not installed; installed: .*fsdp2.*",
    "+strategy.ghost.x=1": r"strategy 'ghost' is not installed; installed: .*fsdp2.*",
    "strategy.fsdp2.shard=2": r"strategy\.fsdp2: strategy 'fsdp2' is not among the selected ones; there are: none",
    "model=lama3_debug": r"model=lama3_debug does not exist; there are: .*llama3_8b.*; did you mean 'llama3_debug'\?",
    "data=stdlb": r"data=stdlb does not exist; there are: hf, stdlib, text; did you mean 'stdlib'\?",
    "+recipe=fdsp2": r"recipe=fdsp2 does not exist; there are: .*; did you mean 'fsdp2'\?",
    "recipe=fsdp2": r"Could not override 'recipe'.* use \+recipe=fsdp2",
    "train.stpes=3": rf"unknown key train\.stpes; there are: {KEYS}; did you mean 'steps'\?",
    "+train.stpes=3": rf"unknown key train\.stpes; there are {KEYS}; did you mean 'steps'\?",
    "trian.steps=3": r"unknown key trian; there are: .*optimizer.*; did you mean 'train'\?",
    "+foo=1": r"unknown key foo; there are run, strategy, .*",
    f"{FSDP} strategy.fsdp2.shrad=2": rf"unknown key strategy\.fsdp2\.shrad; there are: {OPTIONS}; did .* 'shard'\?",
    f"{FSDP} +strategy.fsdp2.shrad=2": rf"unknown key strategy\.fsdp2\.shrad; there are {OPTIONS}; did .* 'shard'\?",
    "model.dims=3": r"unknown key model\.dims; there are: .*n_layers.*; did you mean 'dim'\?",
    "+model.dims=3": r"unknown key model\.dims; model\._target_=.*\.Llama3 takes .*; did you mean 'dim'\?",
    "model._target_=nowhere.Model": r"model\._target_=nowhere\.Model cannot be made: .*No module named 'nowhere'",
    "model._target_=collections.Counter": r"model\._target_=collections\.Counter made a Counter, not a torch module",
    "optimizer._target_=torch.optim.Adma": r"optimizer\._target_=torch\.optim\.Adma cannot be made: .*Adma.*",
    "+optimizer.lrr=3": r"unknown key optimizer\.lrr; optimizer\._target_=.*AdamW takes lr, .*; did you mean 'lr'\?",
    # what is no override at all
    "train.steps": r"'train\.steps' is no override \(.*\): write key=value",
    "train.steps=[1": r"'train\.steps=\[1' is no override \(.*\): write key=value",
    "strategy=null": r"strategy=null must name options, and null is no name: strategy=.*",
    "train.steps=${nope}": r"train\.steps: Interpolation key 'nope' not found",
    "--config-dir nowhere": r"Additional config directory .*nowhere' not found",
    "--config-name nope": r"Cannot find primary config 'nope'.*",
    # values
    "train.steps=many": r"train\.steps is 'many'; it must be a whole number",
    "train.steps=0": r"train\.steps must be >= 1: 0",
    "train=3": r"train is 3; it must be a node with the keys steps, seq_len, .*",
    "precision.param=fp16": r"precision\.param must be in \('float32', 'float64', 'bfloat16'\) \(got 'fp16'\)",
    "schedule.decay_steps=-3": r"schedule\.decay_steps must be >= 0: -3",
    f"{FSDP} strategy.fsdp2.reshard_after_forward=maybe": r"strategy\.fsdp2\.reshard_after_forward must be in \(.*",
    "run.name=../x": r"run\.name must be a plain name, and '\.\./x' holds a path separator",
    "strategy=": r"strategy= names none; write strategy=\[\] for no strategy",
    "compile.enabled=true compile.backend=inductr": (
        r"compile\.backend=inductr is none of torch's: aot_eager, .*; did you mean 'inductor'\?"
    ),
    "profile.enabled=true profile.ranks=[1]": r"profile\.ranks=\[1\] names rank 1; there are 0 to 0",
    "profile.enabled=true profile.start=500": r"profile\.start=500 is past the last step, train\.steps=\d+",
    "optimizer.lr=fast": r"optimizer\.lr is 'fast'; it must be a number",
    # degrees and batches
    f"{FSDP} strategy.fsdp2.shard=3 launch.nproc_per_node=4": (
        r"the mesh does not fit 4 ranks: it needs exactly 3; axes: dp_replicate=1 \(fsdp2\), dp_shard=3 \(fsdp2\)"
    ),
    f"{FSDP} strategy.fsdp2.replicate=3": (
        r"the mesh does not fit 2 ranks: it needs a multiple of 3; axes: dp_replicate=3 \(fsdp2\), dp_shard=-1 .*"
    ),
    f"{FSDP} strategy.fsdp2.shard=0": r"strategy\.fsdp2\.shard must be at least 1, or -1 for what is left: 0",
    f"{FSDP} strategy.fsdp2.replicate=-1": (
        r"only one axis may take what is left \(-1\), but dp_replicate and dp_shard both do; axes: .*"
    ),
    "launch.nproc_per_node=2": r"the mesh does not fit 2 ranks: it needs exactly 1; no selected strategy has an axis.*",
    "launch.nproc_per_node=two": r"launch\.nproc_per_node is 'two'; it must be a whole number or 'auto'",
    "launch.mode=external": r"launch\.mode=external, but neither RANK and WORLD_SIZE nor SLURM_PROCID .*",
    f"{FSDP} train.local_batch_size=2 train.global_batch_size=6": (
        r"train\.global_batch_size=6 does not divide into batches of train\.local_batch_size=2 on 2 data ranks; "
        "4 or 8 would"
    ),
    "model.n_heads=7": r"model\.n_heads is 7, which does not divide model\.dim = 256; .* would",
    "train.seq_len=4096": r"train\.seq_len=4096 is longer than the model's: model\.max_seq_len=2048",
    # data
    "data=text": r"data\.path must be given; it has no default",
    "data=text data.path=text.tx": r"data\.path=text\.tx does not exist; did you mean 'text\.txt'\?",
    "data=text data.path=empty.txt": r"data\.path=empty\.txt: the file is empty",
    "data=text data.path=nothing": r"data\.path=nothing: the folder holds no files",
    "data.tokenizer=nope": r"data\.tokenizer='nope' is neither 'bytes' nor a file or folder",
    "model.vocab_size=100": r"data\.tokenizer=bytes has 257 tokens but model\.vocab_size=100: .* at least 257.*",
    "data.validation_fraction=0": r"validation\.interval=40, but the data holds nothing out; set .*",
    # checkpoints
    "checkpoint.load=lastest": r"checkpoint\.load=lastest cannot be loaded: there is no such folder",
    "checkpoint.load=nothing": r"checkpoint\.load=nothing cannot be loaded: it has no manifest\.json.*",
    "checkpoint.init_from=nowhere": r"there are no weights at nowhere: no such file or folder",
    "checkpoint.init_from=nothing": r"the folder nothing holds neither a checkpoint of Plait nor \.safetensors files",
}


@pytest.mark.parametrize("arguments", CASES)
def test_one_sentence(arguments):
    refused(CASES[arguments], *arguments.split())


def test_a_good_command_would_start():
    """Else all of the above might fail for another reason."""
    assert plait("train", FSDP, "launch.device=cpu").code == STARTED
    assert Path("runs/llama3_debug-fsdp2/config.yaml").exists()


def test_inspect_is_as_strict():
    refused(r"world=many must be a number of ranks, at least 1, such as world=4", "world=many", command="inspect")
    refused(
        r"the mesh does not fit 6 ranks: it needs exactly 4; .*",
        FSDP,
        "strategy.fsdp2.shard=4",
        "world=6",
        command="inspect",
    )
    refused(r"strategy=fsdp is not installed; .*", "strategy=[fsdp]", command="inspect")


def test_a_config_that_is_no_yaml():
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text("dim: [1\n")
    refused(r"ParserError: .*mine\.yaml.*", "model=mine")


def test_a_model_that_cannot_be_made():
    Path("mine.py").write_text("class Broken:\n    def __init__(self):\n        assert False\n")
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text("_target_: mine.Broken\n")
    refused(r"model\._target_=mine\.Broken cannot be made: AssertionError", "model=mine")


# Strategies that are broken


@pytest.fixture
def strategies(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("strategies")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    forget(folder)


def hook(name, body):
    return f"{STRATEGY}\n    @hookimpl\n    def {name}:\n        {body}\n"


BAD = r"strategy 'ghost' \(plait-bad 1\.0\)"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import nowhere", rf"{BAD} cannot be imported from plait_bad:Ghost: ModuleNotFoundError: .*'nowhere'"),
        ("Ghost = dict", rf"{BAD} is not an attrs class: .*"),
        (hook("clip_grad(self)", "pass"), rf"{BAD} does not fit the hooks of API 1: .*'clip_grad'.*"),
        (
            hook("after_step(self, setp)", "pass"),
            rf"{BAD} does not fit the hooks of API 1: .*'after_step'.*\bsetp\b.*",
        ),
        (hook("build_mesh(self)", "pass"), rf"{BAD} returned None from its hook 'build_mesh', which owes a list .*"),
        (
            hook("build_mesh(self)", "return 1 / 0"),
            rf"ZeroDivisionError: division by zero \(raised by {BAD} in its hook 'build_mesh'\); "
            "PLAIT_TRACE_PLUGINS=1 shows where",
        ),
        (
            "from plait import PlaitError\n" + hook("configure(self)", "raise PlaitError('strategy.ghost.x=1 is odd')"),
            rf"strategy\.ghost\.x=1 is odd \(raised by {BAD} in its hook 'configure'\)",
        ),
    ],
    ids=["import", "class", "hook", "argument", "None", "exception", "its own sentence"],
)
def test_a_plugin_that_fails_is_named(strategies, code, sentence):
    distribution(strategies, "plait-bad", code=code)
    refused(sentence, "strategy=[ghost]")
    assert plait("train", FSDP, "launch.device=cpu").code == STARTED


def test_a_plugin_without_options_file(strategies):
    distribution(strategies, "plait-bad")
    (strategies / "plait_bad/conf/strategy/ghost.yaml").unlink()
    refused(f"{BAD} has no conf/strategy/ghost.yaml in its package plait_bad", "strategy=[ghost]")


def test_a_plugin_that_fails_in_parallelize(strategies):
    distribution(strategies, "plait-bad", code=hook("parallelize(self)", "raise ValueError"))
    sentence = rf"ValueError \(raised by {BAD} in its hook 'parallelize'\); PLAIT_TRACE_PLUGINS=1 shows where"
    refused(sentence, "strategy=[ghost]", "launch.device=cpu", command="inspect")


@pytest.mark.slow
def test_a_plugin_that_fails_in_the_ranks(strategies, tmp_path):
    distribution(strategies, "plait-bad", code=hook("parallelize(self)", "raise ValueError('planted')"))
    done = train("strategy=[ghost]", cwd=tmp_path, PYTHONPATH=str(strategies))
    assert done.returncode == 1
    assert re.search(rf"ValueError: planted \(raised by {BAD} in its hook 'parallelize'\).*its log: ", done.stderr)
    assert "Traceback" not in done.stdout + done.stderr


def test_two_plugins_of_one_name(strategies):
    for name in ("plait-one", "plait-two"):
        distribution(strategies, name)
    refused(r"strategy 'ghost' .* defined twice: by plait-one and by plait-two; uninstall one", "strategy=[ghost]")
    assert plait("train", FSDP, "launch.device=cpu").code == STARTED


@pytest.mark.parametrize(("api", "why"), [("v2", "written for hook API 2; .*"), (None, "declares no hook API: .*")])
def test_a_plugin_for_another_hook_api(strategies, api, why):
    distribution(strategies, "plait-bad", api=api)
    refused(f"{BAD} cannot be used: {why}", "strategy=[ghost]")


def test_two_claims_of_one_role(strategies):
    distribution(strategies, "plait-bad", code=STRATEGY + "    claims = ('parameter_sharding',)\n")
    refused(r"strategies 'ghost' and 'fsdp2' both claim the role 'parameter_sharding', .*", "strategy=[ghost,fsdp2]")


def test_tokens_split_and_nobody_sums(strategies):
    distribution(strategies, "plait-bad", code=STRATEGY.replace("self.degree)", "2, splits='batch')"))
    refused(
        r"the axes ghost=2 \(ghost\) split the tokens, but no selected strategy sums the gradients .*",
        "strategy=[ghost]",
    )


# Checkpoints that are broken


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run with checkpoints of steps 5 and 10, of which only manifests and digests are read before ranks start."""
    with contextlib.chdir(tmp_path_factory.mktemp("prepared")):
        assert plait("train", "run.name=a", "launch.device=cpu").code == STARTED
        folder = Path("runs/a").absolute()
    checked = check(yaml.safe_load((folder / "config.yaml").read_text()))
    store = Store(folder / "checkpoints")
    for step in (5, 10):
        whole = store.temporary(step)
        whole.mkdir(parents=True)
        (whole / "tensors").write_bytes(bytes([step]) * 100)
        files = {"tensors": (100, digest(whole / "tensors"))}
        shapes = {name: (shape, "float32") for name, shape in checked.shapes.items()}
        store.commit(whole, Manifest(step, config=checked.node, parameters=shapes, files=files))
    return folder


@pytest.fixture
def run(prepared):
    return shutil.copytree(prepared, Path("runs/a"))


def again(*overrides):
    return plait("train", "run.name=a", "launch.device=cpu", *overrides)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_sound_checkpoint_is_taken(run):
    done = again()
    assert done.code == STARTED
    assert "checkpoint: resuming after step 10 from " in done.out


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda step: damage(step / "tensors"), "its file tensors was changed after it was written"),
        (lambda step: damage(step / "manifest.json"), "its manifest.json"),
        (lambda step: (step / "manifest.json").write_text('{"step": 10'), "its manifest.json is broken"),
        (lambda step: (step / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda step: (step / "tensors").unlink(), "its file tensors is missing"),
        (lambda step: (step / "tensors").write_bytes(b"short"), "its file tensors has 5 bytes instead of 100"),
    ],
    ids=["flipped", "flipped manifest", "torn manifest", "no manifest", "missing", "cut"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(run, act, why):
    step = run / "checkpoints" / "step-10"
    act(step)
    before = contents()
    done = again()
    assert done.code == STARTED
    assert f"skipping the checkpoint {step.absolute()}: {why}" in done.out
    assert f"checkpoint: resuming after step 5 from {step.absolute().with_name('step-5')}" in done.out
    assert {p: c for p, c in contents().items() if "checkpoints" in p} == {
        p: c for p, c in before.items() if "checkpoints" in p
    }
    refused(rf"checkpoint\.load={step} cannot be loaded: {why}.*", "run.name=b", f"checkpoint.load={step}")


def test_a_half_written_checkpoint_is_not_taken(run):
    steps = run / "checkpoints"
    shutil.move(steps / "step-10", steps / "step-10.tmp")
    (steps / "step-10.tmp" / "manifest.json").unlink()
    done = again()
    assert "checkpoint: resuming after step 5 from " in done.out
    assert "damaged" not in done.out


def test_a_checkpoint_of_another_model(run):
    start = r"the checkpoint of step 10 is of another model: "
    dim = start + r"'tok_embeddings\.weight' has shape \(272, 256\) there and \(272, 128\) in this run"
    refused(dim, "run.name=a", "model.dim=128")
    refused(start + r"it lacks 'layers\.4\..*", "run.name=a", "model.n_layers=5")
    refused(start + r"it has 'layers\.3\.[^']*', which this run's model has not.*", "run.name=a", "model.n_layers=3")
    refused(dim, "run.name=b", "model.dim=128", f"checkpoint.load={run}/checkpoints/step-10")
    assert again().code == STARTED


def test_never_does_not_start_over(run):
    refused(
        r"checkpoint\.load=never would start over beside 2 checkpoint\(s\), .*", "run.name=a", "checkpoint.load=never"
    )


# As the user meets them


def test_the_command_itself():
    """Nothing but the sentence comes out of a process either: no warnings, no traceback."""
    done = plait_command("train", *SMALL, FSDP, "trian.steps=3", cwd=Path())
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"plait: {CASES['trian.steps=3']}\n", done.stderr)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_flipped_byte_in_a_real_checkpoint(tmp_path):
    options = ("run.name=a", "strategy=[]", "checkpoint.mode=sync")
    for folder, steps in (("whole", 15), ("broken", 10)):
        Path(folder).mkdir()
        assert train(*options, f"train.steps={steps}", "schedule.decay_steps=0", cwd=tmp_path / folder).returncode == 0
    last = tmp_path / "broken/runs/a/checkpoints/step-10"
    damage(max(last.iterdir(), key=lambda p: p.stat().st_size))
    done = train(*options, "train.steps=15", "schedule.decay_steps=0", cwd=tmp_path / "broken")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"skipping the checkpoint {last}: its file ") == 1
    assert "checkpoint: resuming after step 5 from " in done.stdout
    whole, broken = (rows(tmp_path / folder / "runs/a") for folder in ("whole", "broken"))
    assert [r["step"] for r in broken] == list(range(1, 16))
    assert [r["loss"] for r in broken] == [r["loss"] for r in whole]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["[]", "[fsdp2]"])
def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, strategy):
    options = (f"strategy={strategy}", "run.name=a", "checkpoint.interval=2", "train.max_norm=inf")
    assert train(*options, "train.steps=4", cwd=tmp_path).returncode == 0
    folder = tmp_path / "runs/a"
    kept = Store.read(folder / "checkpoints/step-4")
    done = train(*options, "optimizer.lr=1e30", "schedule.warmup_steps=0", cwd=tmp_path)
    assert done.returncode == 1
    found = re.search(
        r"^plait: the (?:loss|norm of the gradients) of step (\d+) is (?:nan|inf): the run stops; .*$",
        done.stderr,
        re.M,
    )
    assert found, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "restarting" not in done.stdout
    step = int(found[1])
    assert 5 <= step <= 7
    assert [r["step"] for r in rows(folder)] == list(range(1, step))
    assert Store(folder / "checkpoints").latest() == folder / f"checkpoints/step-{step - 1 - (step - 1) % 2}"
    assert Store.verify(folder / "checkpoints/step-4") is None
    assert Store.read(folder / "checkpoints/step-4") == kept
