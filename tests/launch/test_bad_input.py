"""What a user can mistype or break: one sentence before any rank starts, no traceback, and a disk as it was."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from plait.checkpoint.files import digest
from plait.checkpoint.store import Manifest, Store
from plait.contract.config import Config
from plait.host import check
from plait.system.errors import one_line
from plait.testing import is_about
from plait.testing.project import STARTED, Project
from tests.helpers.commands import SMALL, rows, train
from tests.helpers.commands import plait as plait_command
from tests.helpers.fakes import STRATEGY, distribution, forget

FSDP = "strategy=[fsdp2]"


def contents():
    found = (path for path in Path().rglob("*") if "__pycache__" not in path.parts)  # Python's own, of imported files
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


@pytest.fixture(autouse=True)
def _folder(plait_project):
    Path("empty.txt").touch()
    Path("nothing").mkdir()
    Path("text.txt").write_text("a text that is long enough " * 400)


def failed(plait_project, *arguments, command="train"):
    before = contents()
    done = plait_project(command, *(("launch.device=cpu", *arguments) if command == "train" else arguments))
    assert done.code == 1, done
    assert contents() == before
    return done


def error_of(plait_project, *arguments, command="train"):
    done = failed(plait_project, *arguments, command=command)
    assert done.err == f"plait: {one_line(done.error)}\n"
    return done.error


def refused(plait_project, sentence, *arguments, command="train"):
    done = failed(plait_project, *arguments, command=command)
    assert re.fullmatch(f"plait: {sentence}\n", done.err), done.err


INSTALLED = ("fsdp2", "tensor_parallel")
DEGREE = "at least 1, or -1 for what is left"
CASES = {  # arguments -> the key at fault, its value, what would fit
    # what does not exist
    "strategy=[fsdp]": ("strategy", "fsdp", INSTALLED),
    "strategy=[fsdp2,tensr]": ("strategy", "tensr", INSTALLED),
    "+strategy.ghost.x=1": ("strategy", "ghost", INSTALLED),
    "strategy.fsdp2.shard=2": ("strategy.fsdp2", None, ()),
    "model=lama3_debug": ("model", "lama3_debug", ("llama3_8b", "llama3_debug")),
    "data=stdlb": ("data", "stdlb", ("hf", "stdlib", "text")),
    "+recipe=fdsp2": ("recipe", "fdsp2", ("fsdp2",)),
    "train.stpes=3": ("train.stpes", None, ("steps", "seq_len")),
    "+train.stpes=3": ("train.stpes", None, ("steps", "seq_len")),
    "trian.steps=3": ("trian", None, ("train", "optimizer")),
    "+foo=1": ("foo", None, ("run", "strategy")),
    f"{FSDP} strategy.fsdp2.shrad=2": ("strategy.fsdp2.shrad", None, ("shard", "replicate", "cpu_offload")),
    f"{FSDP} +strategy.fsdp2.shrad=2": ("strategy.fsdp2.shrad", None, ("shard", "replicate", "cpu_offload")),
    "model.dims=3": ("model.dims", None, ("dim", "n_layers")),
    "+model.dims=3": ("model.dims", None, ("dim", "n_layers")),
    "model._target_=nowhere.Model": ("model._target_", "nowhere.Model", ()),
    "model._target_=collections.Counter": ("model._target_", "collections.Counter", "a torch module"),
    "optimizer._target_=torch.optim.Adma": ("optimizer._target_", "torch.optim.Adma", ()),
    "+optimizer.lrr=3": ("optimizer.lrr", None, ("lr", "betas")),
    # what is not an override at all
    "train.steps": ("train.steps", None, "key=value"),
    "train.steps=[1": ("train.steps=[1", None, "key=value"),
    "strategy=null": ("strategy", None, "strategy=[NAME]"),
    "strategy=": ("strategy", None, "[]"),
    "train.steps=${nope}": ("train.steps", None, ()),
    # values
    "train.steps=many": ("train.steps", "many", "a whole number"),
    "train.steps=0": ("train.steps", 0, ">= 1"),
    "train=3": ("train", 3, "a node with the keys steps, seq_len, "),
    "precision.param=fp16": ("precision.param", "fp16", ("float32", "float64", "bfloat16")),
    "schedule.decay_steps=-3": ("schedule.decay_steps", -3, ">= 0"),
    f"{FSDP} strategy.fsdp2.reshard_after_forward=maybe": (
        "strategy.fsdp2.reshard_after_forward",
        "maybe",
        ("always", "never"),
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
    "launch.nproc_per_node=two": ("launch.nproc_per_node", "two", "a whole number or 'auto'"),
    "launch.mode=external": ("launch.mode", "external", ("local",)),
    f"{FSDP} train.local_batch_size=2 train.global_batch_size=6": ("train.global_batch_size", 6, (4, 8)),
    "model.n_heads=7": ("model.n_heads", 7, (8,)),
    "train.seq_len=4096": ("train.seq_len", 4096, "at most 2048"),
    # data
    "data=text": ("data.path", None, ()),
    "data=text data.path=text.tx": ("data.path", "text.tx", ("text.txt",)),
    "data=text data.path=empty.txt": ("data.path", "empty.txt", ()),
    "data=text data.path=nothing": ("data.path", "nothing", ()),
    "data.tokenizer=nope": ("data.tokenizer", "nope", "'bytes', a file or a folder"),
    "model.vocab_size=100": ("model.vocab_size", 100, "at least 257"),
    "data.validation_fraction=0": ("validation.interval", 40, (0,)),
    # checkpoints
    "checkpoint.load=lastest": ("checkpoint.load", "lastest", ()),
    "checkpoint.load=nothing": ("checkpoint.load", "nothing", ()),
}
SENTENCES = {  # of Hydra and of files, which have no key
    "recipe=fsdp2": r"Could not override 'recipe'.* use \+recipe=fsdp2",
    "--config-dir nowhere": r"Additional config directory .*nowhere' not found",
    "--config-name nope": r"Cannot find primary config 'nope'.*",
    "checkpoint.init_from=nowhere": r"there are no weights at nowhere: .*",
    "checkpoint.init_from=nothing": r"the folder nothing holds .*",
}


@pytest.mark.parametrize("arguments", CASES)
def test_what_is_at_fault(plait_project, arguments):
    is_about(error_of(plait_project, *arguments.split()), *CASES[arguments])


def test_a_debugger_changes_no_sentence(plait_project):
    plain, before = str(error_of(plait_project, "train.stpes=3")), sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert str(error_of(plait_project, "train.stpes=3")) == plain
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("arguments", SENTENCES)
def test_one_sentence(plait_project, arguments):
    refused(plait_project, SENTENCES[arguments], *arguments.split())


def test_the_command_prints_the_error_as_it_is(plait_project):
    """What the parts are compared with elsewhere is what a user reads."""
    error = error_of(plait_project, "train.stpes=3")
    assert str(error) == f"unknown key train.stpes; available: {', '.join(error.fits)}; did you mean 'steps'?"


def test_a_good_command_would_start(plait_project):
    """Else all of the above might fail for another reason."""
    assert plait_project("train", FSDP, "launch.device=cpu").code == STARTED
    assert Path("runs/llama3_debug-fsdp2/config.yaml").exists()


def test_inspect_is_as_strict(plait_project):
    is_about(error_of(plait_project, "world=many", command="inspect"), "world", "many", "a number of ranks, at least 1")
    degree = error_of(plait_project, FSDP, "strategy.fsdp2.shard=4", "world=6", command="inspect")
    is_about(degree, "world", 6, "exactly 4")
    is_about(error_of(plait_project, "strategy=[fsdp]", command="inspect"), "strategy", "fsdp", INSTALLED)


def test_a_config_that_is_no_yaml(plait_project):
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text("dim: [1\n")
    refused(plait_project, r"ParserError: .*mine\.yaml.*", "model=mine")


def test_a_model_that_cannot_be_made(plait_project):
    Path("mine.py").write_text("class Broken:\n    def __init__(self):\n        assert False\n")
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text("_target_: mine.Broken\n")
    refused(plait_project, r"model\._target_=mine\.Broken cannot be made: AssertionError", "model=mine")


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
        ("Ghost = dict", rf"{BAD} must be an attrs class, .*"),
        (hook("clip_grad(self)", "pass"), rf"{BAD} does not fit the hooks of API 1: .*'clip_grad'.*"),
        (
            hook("after_step(self, setp)", "pass"),
            rf"{BAD} does not fit the hooks of API 1: .*'after_step'.*\bsetp\b.*",
        ),
        (
            hook("build_mesh(self)", "pass"),
            rf"{BAD} returned None from its hook 'build_mesh', which must return a list .*",
        ),
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
def test_a_plugin_that_fails_is_named(plait_project, strategies, code, sentence):
    distribution(strategies, "plait-bad", code=code)
    refused(plait_project, sentence, "strategy=[ghost]")
    assert plait_project("train", FSDP, "launch.device=cpu").code == STARTED


def test_a_plugin_without_options_file(plait_project, strategies):
    distribution(strategies, "plait-bad")
    (strategies / "plait_bad/conf/strategy/ghost.yaml").unlink()
    refused(plait_project, f"{BAD} has no conf/strategy/ghost.yaml in its package plait_bad", "strategy=[ghost]")


def test_a_plugin_that_fails_in_parallelize(plait_project, strategies):
    distribution(strategies, "plait-bad", code=hook("parallelize(self)", "raise ValueError"))
    sentence = rf"ValueError \(raised by {BAD} in its hook 'parallelize'\); PLAIT_TRACE_PLUGINS=1 shows where"
    refused(plait_project, sentence, "strategy=[ghost]", "launch.device=cpu", command="inspect")


@pytest.mark.slow
def test_a_plugin_that_fails_in_the_ranks(strategies, tmp_path):
    distribution(strategies, "plait-bad", code=hook("parallelize(self)", "raise ValueError('planted')"))
    done = train("strategy=[ghost]", cwd=tmp_path, PYTHONPATH=str(strategies))
    assert done.code == 1
    assert re.search(rf"ValueError: planted \(raised by {BAD} in its hook 'parallelize'\).*its log: ", done.err)
    assert "Traceback" not in done.out + done.err


def test_two_plugins_of_one_name(plait_project, strategies):
    for name in ("plait-one", "plait-two"):
        distribution(strategies, name)
    refused(
        plait_project,
        r"strategy=ghost is defined twice: by plait-one \(.*\) and by plait-two \(.*\); uninstall one",
        "strategy=[ghost]",
    )
    assert plait_project("train", FSDP, "launch.device=cpu").code == STARTED


@pytest.mark.parametrize(("api", "why"), [("v2", "written for hook API 2; .*"), (None, "declares no hook API: .*")])
def test_a_plugin_for_another_hook_api(plait_project, strategies, api, why):
    distribution(strategies, "plait-bad", api=api)
    refused(plait_project, f"{BAD} cannot be used: {why}", "strategy=[ghost]")


def test_two_claims_of_one_role(plait_project, strategies):
    distribution(strategies, "plait-bad", code=STRATEGY + "    claims = ('parameter_sharding',)\n")
    refused(
        plait_project,
        r"strategies 'ghost' and 'fsdp2' both claim the role 'parameter_sharding', .*",
        "strategy=[ghost,fsdp2]",
    )


def test_tokens_split_and_nobody_sums(plait_project, strategies):
    distribution(strategies, "plait-bad", code=STRATEGY.replace("self.degree)", "2, splits='batch')"))
    refused(
        plait_project,
        r"the axes ghost=2 \(ghost\) split the tokens, but no selected strategy sums the gradients .*",
        "strategy=[ghost]",
    )


# Checkpoints that are broken


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run with checkpoints of steps 5 and 10, of which only manifests are read before ranks start."""
    project = Project(tmp_path_factory.mktemp("prepared"))
    assert project("train", "run.name=a", "launch.device=cpu", cwd=project.path).code == STARTED
    folder = project.path / "runs/a"
    checked = check(Config.of(yaml.safe_load((folder / "config.yaml").read_text())))
    store = Store(folder / "checkpoints")
    for step in (5, 10):
        whole = store.temporary(step)
        whole.mkdir(parents=True)
        (whole / "tensors").write_bytes(bytes([step]) * 100)
        files = {"tensors": (100, digest(whole / "tensors"))}
        shapes = {name: (shape, "float32") for name, shape in checked.shapes.items()}
        store.commit(whole, Manifest(step, config=checked.config.plain(), parameters=shapes, files=files))
    return folder


@pytest.fixture
def run(prepared):
    return shutil.copytree(prepared, Path("runs/a"))


def again(plait_project, *overrides):
    return plait_project("train", "run.name=a", "launch.device=cpu", *overrides)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_sound_checkpoint_is_taken(plait_project, run):
    done = again(plait_project)
    assert done.code == STARTED
    assert "checkpoint: resuming after step 10 from " in done.out


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda step: damage(step / "manifest.json"), "its manifest.json"),
        (lambda step: (step / "manifest.json").write_text('{"step": 10'), "its manifest.json is broken"),
        (lambda step: (step / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda step: (step / "tensors").unlink(), "its file tensors is missing"),
        (lambda step: (step / "tensors").write_bytes(b"short"), "its file tensors has 5 bytes instead of 100"),
    ],
    ids=["flipped manifest", "torn manifest", "no manifest", "missing", "cut"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(plait_project, run, act, why):
    step = run / "checkpoints" / "step-10"
    act(step)
    before = contents()
    done = again(plait_project)
    assert done.code == STARTED
    assert f"skipping the checkpoint {step.absolute()}: {why}" in done.out
    assert f"checkpoint: resuming after step 5 from {step.absolute().with_name('step-5')}" in done.out
    assert {p: c for p, c in contents().items() if "checkpoints" in p} == {
        p: c for p, c in before.items() if "checkpoints" in p
    }
    refused(
        plait_project, rf"checkpoint\.load={step} cannot be loaded: {why}.*", "run.name=b", f"checkpoint.load={step}"
    )


def test_a_half_written_checkpoint_is_not_taken(plait_project, run):
    steps = run / "checkpoints"
    shutil.move(steps / "step-10", steps / "step-10.tmp")
    (steps / "step-10.tmp" / "manifest.json").unlink()
    done = again(plait_project)
    assert "checkpoint: resuming after step 5 from " in done.out
    assert "damaged" not in done.out


def test_a_checkpoint_of_another_model(plait_project, run):
    start = r"the checkpoint of step 10 is of another model: "
    dim = start + r"'tok_embeddings\.weight' has shape \(272, 256\) there and \(272, 128\) in this run"
    refused(plait_project, dim, "run.name=a", "model.dim=128")
    refused(plait_project, start + r"it lacks 'layers\.4\..*", "run.name=a", "model.n_layers=5")
    refused(
        plait_project,
        start + r"it has 'layers\.3\.[^']*', which this run's model does not have.*",
        "run.name=a",
        "model.n_layers=3",
    )
    refused(plait_project, dim, "run.name=b", "model.dim=128", f"checkpoint.load={run}/checkpoints/step-10")
    assert again(plait_project).code == STARTED


def test_never_does_not_start_over(plait_project, run):
    refused(
        plait_project,
        r"checkpoint\.load=never would start over beside 2 checkpoint\(s\), .*",
        "run.name=a",
        "checkpoint.load=never",
    )


# As the user meets them


def test_the_command_itself(plait_project):
    """Nothing but the sentence comes out of a process either: no warnings, no traceback."""
    done = plait_command("train", *SMALL, FSDP, "trian.steps=3", cwd=Path())
    assert (done.code, done.out) == (1, "")
    assert done.err == f"plait: {error_of(plait_project, *SMALL, FSDP, 'trian.steps=3')}\n"
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_flipped_byte_in_a_real_checkpoint(tmp_path):
    options = ("run.name=a", "strategy=[]", "checkpoint.mode=sync")
    for folder, steps in (("whole", 15), ("broken", 10)):
        Path(folder).mkdir()
        assert train(*options, f"train.steps={steps}", "schedule.decay_steps=0", cwd=tmp_path / folder).code == 0
    last = tmp_path / "broken/runs/a/checkpoints/step-10"
    damage(max(last.iterdir(), key=lambda p: p.stat().st_size))
    done = train(*options, "train.steps=15", "schedule.decay_steps=0", cwd=tmp_path / "broken")
    assert done.code == 0, done.err
    assert done.out.count(f"skipping the checkpoint {last}: its file ") == 1
    assert "checkpoint: resuming after step 5 from " in done.out  # its rank has found the damage
    whole, broken = (rows(tmp_path / folder / "runs/a") for folder in ("whole", "broken"))
    assert [r["step"] for r in broken] == list(range(1, 16))
    assert [r["loss"] for r in broken] == [r["loss"] for r in whole]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["[]", "[fsdp2]"])
def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, strategy):
    options = (f"strategy={strategy}", "run.name=a", "checkpoint.interval=2", "train.max_norm=inf")
    assert train(*options, "train.steps=4", cwd=tmp_path).code == 0
    folder = tmp_path / "runs/a"
    kept = Store.read(folder / "checkpoints/step-4")
    done = train(*options, "optimizer.lr=1e30", "schedule.warmup_steps=0", cwd=tmp_path)
    assert done.code == 1
    found = re.search(
        r"^plait: the (?:loss|norm of the gradients) of step (\d+) is (?:nan|inf): the run stops; .*$",
        done.err,
        re.M,
    )
    assert found, done.err
    assert "Traceback" not in done.err + done.out
    assert "restarting" not in done.out
    step = int(found[1])
    assert 5 <= step <= 7
    assert [r["step"] for r in rows(folder)] == list(range(1, step))
    assert Store(folder / "checkpoints").latest() == folder / f"checkpoints/step-{step - 1 - (step - 1) % 2}"
    assert Store.verify(folder / "checkpoints/step-4") is None
    assert Store.read(folder / "checkpoints/step-4") == kept
