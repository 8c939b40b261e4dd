"""What branches get beside the stream, and what meets the stream outside of them: right, or refused in one sentence."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import ModelSpec, PlaitError
from plait.ops import Normal
from plait.testing import assert_same
from plait_tensor_parallel import TensorParallel
from plait_tensor_parallel.wrap import writable
from plait_testing.pool import RankError
from plait_testing.trial import Trial, batch, train

WIDTH, HEAD = 16, 4
WHOLE = {"sequence_parallel": False}
SLOW = pytest.mark.slow


class Attention(nn.Module):
    """Called with a stream each for values, keys and queries, as that of CTRL. extra: one more, or a factor."""

    def __init__(self):
        super().__init__()
        self.v, self.k, self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, v, k, *, q, mask, turns, extra=None):
        heads = lambda x: x.unflatten(-1, (-1, HEAD)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(self.q(q)) * turns[0], heads(self.k(k)) * turns[1], heads(self.v(v))
        out = self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2))
        return out if extra is None else out * (extra[0] if isinstance(extra, tuple) else extra).sum(-1, keepdim=True)


SECOND = {  # what a block passes beside the stream y; x: before the norm
    "the same": lambda x, y: {"q": y},
    "another": lambda x, y: {"q": x},
    "a copy": lambda x, y: {"q": y.detach()},
    "another in a tuple": lambda x, y: {"q": y, "extra": (x,)},
    "a gate": lambda x, y: {"q": y, "extra": x[..., :2].sigmoid()},
}


class Block(nn.Module):
    def __init__(self, second):
        super().__init__()
        self.norm, self.attention, self.second = nn.LayerNorm(WIDTH), Attention(), second

    def forward(self, x, mask, turns):
        y = self.norm(x)
        return x + self.attention(y, y, mask=mask, turns=turns, **SECOND[self.second](x, y))


class Model(nn.Module):
    """second: of `SECOND`. divided: whether attention is. written: what is looked up is written in place. table: a
    constant of all positions is added to the stream. broken: "branch", "model", or what the model raises."""

    def __init__(self, second="the same", divided=True, written=False, table=False, broken=""):
        super().__init__()
        self.words, self.places = nn.Embedding(64, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(second) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.divided, self.written, self.table, self.broken = divided, written, table, broken

    def forward(self, tokens, positions=None):
        length, like = tokens.shape[1], {"device": tokens.device, "dtype": self.head.weight.dtype}
        x, places = self.words(tokens), self.places(torch.arange(length, device=tokens.device))
        if self.written:
            x *= 4
            places += 1
        x = x + places
        if self.table:
            x = x + torch.linspace(-1, 1, length * WIDTH, **like).view(length, WIDTH)
        if self.broken not in ("", "branch"):
            raise RuntimeError("broken" if self.broken == "model" else self.broken)
        mask = torch.full((length, length), -torch.inf, **like).triu(1)
        turns = tuple(torch.linspace(low, 1, length * HEAD, **like).view(1, 1, length, HEAD) for low in (0, 0.5))
        for block in self.blocks:
            x = block(x, mask if self.broken != "branch" else mask[1:], turns)
        return self.head(x)

    def spec(self):
        heads = "heads" if self.divided else None
        return ModelSpec(
            axes={
                "words.weight": ("vocab", "embed"),
                "places.weight": (None, "embed"),
                "head.weight": ("vocab", "embed"),
                "blocks.*.norm.*": ("embed",),
                "blocks.*.attention.out.weight": ("embed", heads),
                "blocks.*.attention.*.weight": (heads, "embed"),
            },
            blocks=("blocks.*",),
            branches=("blocks.*.attention",),
            sizes={"heads": WIDTH // HEAD},
            init={"*.*": Normal(0.5), "*.*.*.*": Normal(0.5), "*.*.*.*.*": Normal(0.5)},
        )


def same(ranks, model, options, beside=None, **trial):
    (one,) = ranks.once(train, Trial(model), world=1)
    strategies = {"tensor_parallel": {"degree": 2, **options}, **(beside or {})}
    assert_same(ranks.run(train, Trial(model, **trial), strategies, world=4 if beside else 2), one)


@pytest.mark.parametrize("beside", [None, pytest.param({"fsdp2": {}}, marks=SLOW)], ids=str)
@pytest.mark.parametrize("options", [{}, WHOLE], ids=str)
def test_one_stream_in_several_arguments(plait_ranks, options, beside):
    if beside:
        pytest.importorskip("plait_fsdp2")
    same(plait_ranks, Model, options, beside)


@pytest.mark.parametrize("options", [{}, pytest.param(WHOLE, marks=SLOW)], ids=str)
def test_of_a_branch_that_is_not_divided(plait_ranks, options):
    same(plait_ranks, functools.partial(Model, divided=False), options)


@SLOW
@pytest.mark.parametrize("options", [{}, WHOLE], ids=str)
def test_compiled(plait_ranks, options):
    same(plait_ranks, functools.partial(Model, written=True), options, compile="aot_eager")


@pytest.mark.parametrize("options", [{}, WHOLE], ids=str)
@pytest.mark.parametrize("second", ["another", "a copy", "another in a tuple", "a gate"])
def test_a_second_stream_is_refused(plait_ranks, second, options):
    says = r"PlaitError: 'blocks\.0\.attention' gets the stream, .*, and another .*, argument (q|extra) of \(8, "
    with pytest.raises(RankError, match=says):
        same(plait_ranks, functools.partial(Model, second), options)


@pytest.mark.parametrize("second", ["another", "a gate"])
def test_a_second_stream_is_right_if_all_ranks_do_the_same(plait_ranks, second):
    same(plait_ranks, functools.partial(Model, second, divided=False), WHOLE)


@pytest.mark.parametrize("beside", [None, pytest.param({"fsdp2": {}}, marks=SLOW)], ids=str)
@pytest.mark.parametrize("options", [{}, WHOLE], ids=str)
def test_what_is_looked_up_may_be_written(plait_ranks, options, beside):
    if beside:
        pytest.importorskip("plait_fsdp2")
    same(plait_ranks, functools.partial(Model, written=True), options, beside)


def test_what_may_be_written_is_no_copy():
    x = torch.zeros(2, 3, requires_grad=True).view(3, 2)
    made = writable(x)
    assert made.data_ptr() == x.data_ptr()
    assert not made._is_view()
    ones = torch.ones_like(made)
    (gradient,) = torch.autograd.grad(made, x, ones)
    assert gradient.data_ptr() == ones.data_ptr(), "nor is its gradient"


def test_a_constant_of_all_positions(plait_ranks):
    model = functools.partial(Model, table=True)
    same(plait_ranks, model, WHOLE)
    says = r"PlaitError: the model's forward fails after 'places', outside branches: The size of tensor a \(8\) must .*"
    with pytest.raises(RankError, match=f"{says}strategy.tensor_parallel.sequence_parallel=false gives"):
        same(plait_ranks, model, {})

    def refused():
        with pytest.raises(PlaitError) as caught:
            train(Trial(model), {"tensor_parallel": {}})
        return caught.value.key, caught.value.value, caught.value.fits

    key = "strategy.tensor_parallel.sequence_parallel"
    assert plait_ranks.run(refused, world=2) == [(key, True, (False,))] * 2


def test_other_errors_stay_as_they_are(plait_ranks):
    def run(broken, options, later):
        with torch.device("meta"):
            model = Model(broken="" if later else broken)
        applied = plait.apply(model, model.spec(), [TensorParallel(**options)], seq_len=16)
        if later:
            applied.parts[0](batch(0)[0])
            model.broken = broken
        with pytest.raises(RuntimeError) as caught:
            applied.parts[0](batch(0)[0])
        return str(caught.value)

    for broken, options, later in (("branch", {}, False), ("model", WHOLE, False), ("model", {}, True)):
        for said in plait_ranks.run(run, broken, options, later, world=2):
            assert "broken" in said if broken == "model" else "size" in said


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory",
        "CUDA driver error: invalid argument",
        "cuBLAS error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "NCCL Error 1: unhandled cuda error",
        "HIP error: invalid device function",
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
    ],
)
def test_errors_of_a_device_are_not_told_as_the_models(plait_ranks, said):
    def run():
        with torch.device("meta"):
            model = Model(broken=said)
        applied = plait.apply(model, model.spec(), [TensorParallel()], seq_len=16)
        with pytest.raises(RuntimeError) as caught:
            applied.parts[0](batch(0)[0])
        return str(caught.value)

    assert plait_ranks.run(run, world=2) == [said, said]
