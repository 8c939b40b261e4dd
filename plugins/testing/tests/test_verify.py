"""`plait verify`: a model of the user's own folder passes as it should be, and is told where its spec is wrong."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from plait import ModelSpec
from plait.contract.config import Config
from plait.host import compose
from plait_testing.declared import FIRST, LAST, LOSSES, NORMS, OfRun, Rounded, may_be_rounding
from plait_testing.finding import Finding
from plait_testing.verify import _vocab, plan
from tests.helpers.fakes import distribution, forget

pytest.importorskip("plait_tensor_parallel")
pytest.importorskip("plait_fsdp2")

MODEL = '''
import torch
import torch.nn.functional as F
from torch import nn

from plait import ModelSpec
from plait.ops import Normal, ones


def zeros(tensor, generator):
    tensor.zero_()


class Mixer(nn.Module):
    """Heads that each mix the tokens before theirs: attention's shape at the least cost."""

    def __init__(self, dim, n_heads, count):
        super().__init__()
        self.head_dim, self.heads = dim // n_heads, n_heads if count else -1
        self.q, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x):
        q, v = (w(x).unflatten(-1, (self.heads, self.head_dim)) for w in (self.q, self.v))
        mixed = v.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None, None]
        return self.out((q.sigmoid() * mixed).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, dim, end_norm, apart, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.end = nn.RMSNorm(dim, 1e-5) if end_norm else nn.Identity()
        self.bias = nn.Parameter(torch.empty(dim)) if apart else 0.0
        self.apart, self.times = apart, 0 if apart == "idle" else 1
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.end(self.down(self.dropout(F.gelu(self.up(x)))) + self.times * self.bias)


class Block(nn.Module):
    def __init__(self, dim, n_heads, count, end_norm, apart, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.mixer, self.mlp = Mixer(dim, n_heads, count), Mlp(dim, end_norm, apart, dropout)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Mine(nn.Module):
    def __init__(self, *, dim, n_layers, n_heads, vocab_size, end_norm, apart, count, dropout, random_init):
        super().__init__()
        self.n_heads, self.random_init = n_heads, random_init
        self.tokens = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads, count, end_norm, apart, dropout) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens, positions=None):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * (0 if self.blocks[0].mlp.apart == "dead" else 1)

    def spec(self):
        def shifted(tensor, generator):
            tensor.normal_(0.0, 0.1, generator=generator)
            tensor += torch.rand(())

        normal, to_embed, from_embed = Normal(0.1), ("embed", "heads"), ("heads", "embed")
        vectors = ["blocks.*.mlp.end.weight", "blocks.*.mlp.bias", "blocks.*.*.weight", "norm.weight"]
        matrices = {"blocks.*.mlp.up.weight": ("ffn", "embed"), "blocks.*.mlp.down.weight": ("embed", "ffn")}
        heads = {"blocks.*.mixer.out.weight": to_embed, "blocks.*.mixer.*.weight": from_embed}
        tables = dict.fromkeys(["tokens.weight", "head.weight"], ("vocab", "embed"))
        norms = ["blocks.*.mlp.end.weight", "blocks.*.norm*.weight", "norm.weight"]
        init = {"*.bias": zeros, "blocks.*.mlp.bias": zeros, **dict.fromkeys(norms, ones)}
        init |= {"head.weight": shifted if self.random_init else normal}
        return ModelSpec(
            axes={**tables, **heads, **matrices, **dict.fromkeys(vectors, ("embed",))},
            blocks=["blocks.*"],
            sizes={"heads": self.n_heads},
            branches=["blocks.*.mixer", "blocks.*.mlp"],
            init={**init, "*.weight": normal, "blocks.*.*.*.weight": normal},
        )
'''
OPTIONS = """
_target_: {module}.Mine
dim: 8
n_layers: 1
n_heads: 2
vocab_size: 272
end_norm: false
apart: false
count: false
dropout: 0.0
random_init: false
"""
TENSOR = ("strategy=[tensor_parallel]", "train.seq_len=8", "model=mine")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's own folder; each has a module of another name, as a process imports one name once."""
    module = f"mine_{abs(hash(tmp_path)):x}"
    (tmp_path / f"{module}.py").write_text(MODEL)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(OPTIONS.format(module=module))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(("mine_", "__pycache__")))


def lines(text, status):
    return [line for line in text.splitlines() if line.startswith(f"{status} ")]


def test_a_model_that_is_declared_right(plait_project, folder):
    done = plait_project("verify", *TENSOR, "world=2")
    assert (done.code, done.err) == (0, "")
    assert "Mine, 4,824 parameters, all in float64 on this machine's processor" in done.out
    assert "layout  2 ranks: tp=2 (tensor_parallel)" in done.out
    assert "\none process took " in done.out
    assert len(lines(done.out, "ok")) == 6
    assert "ok     initial parameters   all 10 bitwise equal" in done.out
    assert done.out.endswith("\nall agree\n")
    assert left(folder) == ["conf"]


@pytest.mark.slow
def test_the_fewest_ranks_and_recomputation(plait_project):
    """An axis that takes what is left has two ranks: tensor ranks alone would leave fsdp2 nothing to shard."""
    done = plait_project(
        "verify", "strategy=[tensor_parallel,fsdp2]", *TENSOR[1:], "remat.mode=full", "optimizer.lr=1e-3"
    )
    assert (done.code, done.err) == (0, "")
    assert "layout  4 ranks: dp_replicate=1 (fsdp2), dp_shard=2 (fsdp2), tp=2 (tensor_parallel)" in done.out


@pytest.mark.slow
def test_a_norm_at_the_end_of_a_branch(plait_project):
    done = plait_project("verify", *TENSOR, "model.end_norm=true")
    assert done.code == 1
    first, *rest = lines(done.out, "WRONG")
    assert first.startswith("WRONG  gradients, step 1    off by ")
    assert len(rest) == 2
    assert "all agree" not in done.out
    table = done.out.partition("gradients, step 1: wrong, worst first\n")[2].splitlines()
    assert any(line.split()[0] == "blocks.0.mlp.down.weight" and "(embed, ffn)" in line for line in table)
    assert any("S(1) over tp" in line for line in table)
    assert table[11].strip() == "and 1 more"
    assert "such as a norm at its end" in done.out
    assert "docs/model-spec.md" in done.out


@pytest.mark.slow
def test_a_bias_apart_from_its_matrix(plait_project):
    """It starts at zero, so that the first loss is right and only gradients tell."""
    done = plait_project("verify", *TENSOR, "model.apart=true")
    assert done.code == 1
    assert any(
        "gradients, step 1 " in line and line.endswith("blocks.0.mlp.bias, 1 of 11 are wrong")
        for line in lines(done.out, "WRONG")
    )
    assert "Forward is right and backward is wrong" in done.out
    assert "-      gradients, step 3    not compared" in done.out


def test_a_parameter_that_nothing_trains(plait_project):
    """The bias counts for nothing, so that its mistake does not show: it is named."""
    done = plait_project("verify", *TENSOR, "model.apart=idle")
    assert (done.code, done.err) == (0, "")
    assert lines(done.out, "-") == [
        "-      never trained        the gradients of 1 parameter(s) are zero in one process too, so nothing is known "
        "of them: blocks.0.mlp.bias"
    ]
    assert done.out.endswith("\nall agree\n")


def test_a_model_in_which_nothing_trains(plait_project):
    """In one process and on ranks alike, so that every comparison would pass."""
    done = plait_project("verify", *TENSOR, "model.apart=dead")
    assert done.code == 1
    assert done.err == "plait: all gradients of one process are zero, so there is nothing to compare with\n"


@pytest.mark.parametrize(("said", "ranks"), [("auto", 2), (1, 2), (4, 4)])
def test_as_many_ranks_as_a_run_would_have_but_never_one(said, ranks):
    config = compose(["strategy=[fsdp2]", f"launch.nproc_per_node={said}", "model.n_layers=1", "model.dim=32"])
    assert plan(config).layout.world_size == ranks


def test_initial_values_that_depend_on_the_rank(plait_project):
    done = plait_project("verify", *TENSOR, "model.random_init=true")
    assert done.code == 1
    assert lines(done.out, "WRONG")[0].startswith("WRONG  initial parameters")
    assert "Initial values depend on the layout" in done.out


@pytest.mark.slow
def test_a_count_of_heads_in_a_view(plait_project, folder):
    """The model cannot run at all on ranks: where it failed, then a sentence."""
    done = plait_project("verify", *TENSOR, "model.count=true")
    assert done.code == 1
    assert f'{next(folder.glob("mine_*.py")).name}", line ' in done.err
    assert "\nplait: the model fails on 2 ranks: rank " in done.err
    assert "raised RuntimeError: unflatten" in done.err


def test_random_numbers_are_refused(plait_project):
    done = plait_project("verify", *TENSOR, "model.dropout=0.5")
    assert done.code == 1
    assert done.err.startswith("plait: the model computes different logits for the same tokens the second time")
    assert done.err.count("\n") == 1


BYTES = SimpleNamespace(vocabulary=257)


@pytest.mark.parametrize(
    ("shapes", "given", "tokens"),
    [
        ({"tokens.weight": (50, 8), "norm.weight": (4,)}, {}, 50),
        ({"tokens.weight": (50, 8), "head.weight": (48, 8)}, {}, 48),
        ({"tokens.weight": (64, 8)}, {"vocab_size": 61}, 61),  # the rows of a padded table
        ({"norm.weight": (4,)}, {}, 257),
    ],
)
def test_the_tokens_are_those_that_all_tables_know(shapes, given, tokens):
    spec = ModelSpec(axes={"norm.weight": ("embed",), "*.weight": ("vocab", "embed")}, blocks=["blocks.*"])
    assert _vocab(SimpleNamespace(config=Config(model=given), shapes=shapes, source=BYTES), spec) == tokens


OWN = """
import attrs
from plait import MeshAxis, hookimpl

@attrs.define
class Ghost:
    numerics = "own"
    claims = ("gradient_sum",)

    @hookimpl
    def build_mesh(self):
        return [MeshAxis("ghost", -1, "batch")]
"""


def test_a_strategy_with_mathematics_of_its_own(plait_project, tmp_path_factory, monkeypatch):
    site = tmp_path_factory.mktemp("strategies")
    monkeypatch.syspath_prepend(str(site))
    distribution(site, "plait-ghost", code=OWN)
    done = plait_project("verify", "strategy=[ghost]", *TENSOR[1:])
    forget(site)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("plait: strategy 'ghost' (plait-ghost 1.0) differs from one process on purpose, and")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("strategy=[fsdp2]", "loss=dpo"),
            "trains on random tokens, and loss=dpo learns from pairs of answers: verify",
        ),
        (("strategy=[]",), "compares strategies with one process, but no strategy is selected; installed: "),
        (("world=1",), "a number of ranks, at least 2"),
        (("world=two",), "a number of ranks, at least 2"),
        (("world=3",), "the mesh does not fit 3 ranks: it needs exactly 2; axes: tp=2 (tensor_parallel)"),
        (("-m",), "plait verify has no option -m; it takes overrides, world=N, dtype=D, --config-dir DIR"),
        (("model.n_lyers=2",), "n_lyers"),
        (("model=mein",), "did you mean 'mine'?"),
        (("strategy.tensor_parallel.degree=4",), "strategy.tensor_parallel.degree=4 does not divide the model's 2 "),
        (("train.seq_len=7",), "train.seq_len=7 is not divisible by strategy.tensor_parallel.degree=2"),
        (("compile.enabled=true", "compile.backend=aot_eagre"), "did you mean 'aot_eager'?"),
        (
            ("model=llama3_1b",),
            "the model has 1,235,814,400 parameters, and plait verify takes 100,000,000 at most",
        ),
    ],
    ids=lambda each: each[-1] if isinstance(each, tuple) else "",
)
def test_bad_input_ends_before_any_rank_starts(plait_project, overrides, said, monkeypatch):
    monkeypatch.setattr("plait_testing.pool.Pool._start", lambda self: pytest.fail("ranks were started"))
    done = plait_project("verify", *TENSOR, *overrides)
    assert (done.code, done.out) == (1, "")
    assert said in done.err
    assert done.err.startswith("plait: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("what", "at", "error", "maybe"),
    [
        (LAST, "w", 1e-7, True),
        (NORMS, "step 3", 1e-8, True),
        (NORMS, "step 1", 1e-8, False),  # no optimizer has enlarged it
        (FIRST, "w", 1e-8, False),
        (LAST, "w", 1e-2, False),  # no rounding is so large
        (LAST, "w", 1e-10, False),  # right
    ],
)
def test_what_may_be_rounding_is_small_and_late(what, at, error, maybe):
    right = Finding(LOSSES, 1e-9, 1e-15, "step 1")
    assert may_be_rounding([right, Finding(what, 1e-9, error, at)]) == maybe
    assert not may_be_rounding([Finding(FIRST, 1e-10, 1e-9, "w"), Finding(what, 1e-9, error, at)])


def test_a_process_that_begins_otherwise_is_rounded_otherwise(monkeypatch):
    rounded = Rounded(config=SimpleNamespace(), vocab=2, data_ranks=1)
    values = torch.nn.Linear(40, 40, bias=False, dtype=torch.float64)
    before = values.weight.detach().clone()
    monkeypatch.setattr(OfRun, "apply", lambda *_: SimpleNamespace(parameters=lambda: [values.weight]))
    rounded.apply({})
    units = ((values.weight - before) / before / torch.finfo(torch.float64).eps).detach()
    assert 0.5 < units.abs().mean() < 0.9
    assert units.abs().max() < 2.1


def test_without_the_extra(plait_project, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    done = plait_project("verify", *TENSOR)
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("which is not installed: pip install 'plait-testing[testing]'\n")


@pytest.mark.slow
def test_it_needs_no_pytest(folder):
    """A run in a process that cannot import it: the extra's other half is for tests alone."""
    code = "import sys; sys.modules['pytest'] = None; import plait_testing.declared, plait_testing.pool"
    subprocess.run([sys.executable, "-c", code], check=True)
