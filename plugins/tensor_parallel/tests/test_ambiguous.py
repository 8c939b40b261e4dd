"""What axes do not tell is refused, or right; it is never wrong in silence."""

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait import ModelSpec, PlaitError
from plait.ops import CausalAttention, Normal
from plait.testing import assert_same
from plait_tensor_parallel.ambiguous import is_second
from plait_testing.pool import RankError
from plait_testing.trial import Trial, train

WIDTH, INNER = 16, 32
WHOLE = {"sequence_parallel": False}
SLOW_WHOLE = pytest.param(WHOLE, marks=pytest.mark.slow)


def made(forward, axes, modules=None, **shapes):
    """A class of branches: what they compute, the axes in the spec, the modules that they have, their parameters."""

    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in shapes.items():
                setattr(self, name, nn.Parameter(torch.empty(shape)))
            for name, module in (modules or {}).items():
                setattr(self, name, module())

    vars_of: Any = Made
    vars_of.forward, vars_of.axes = forward, axes
    return Made


def linear(into=WIDTH, out=WIDTH, bias=False):
    return lambda: nn.Linear(into, out, bias)


def of_its_own(forward, **shapes):
    return made(forward, {}, **shapes)


def feed(self, x):
    return F.linear(F.gelu(F.linear(x, self.up)) * self.scale, self.down)


def stack(self, x):
    """Of experts, each of which sees every token."""
    return torch.einsum("btxf,xdf->btd", F.gelu(torch.einsum("btd,xfd->btxf", x, self.up)), self.down)


def beside(self, x):
    return feed(self, x) + self.experts(x)


def attention(self, x):
    """Its view has the number of heads: on a rank that has half of them, heads of half the width."""
    q, k, v = (getattr(self, name)(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for name in "qkv")
    return self.out(self.inner(q, k, v).transpose(1, 2).flatten(-2))


def split(self, x, scale=1.0):
    return self.down(self.slope(self.up(x))) * scale


def around(what):
    """Something between the matrices."""
    return lambda self, x: F.linear(getattr(self, what)(F.linear(x, self.up)), self.down)


def own_norm(self, x):
    return x * self.weight / x.pow(2).mean(-1, keepdim=True).sqrt()


MATRICES = {"up": (INNER, WIDTH), "down": (WIDTH, INNER)}
OF_MATRICES = {"up": ("ffn", "embed"), "down": ("embed", "ffn")}
SHAPES, RAW = {**MATRICES, "scale": (1,)}, {**OF_MATRICES, "scale": (None,)}
STACK = {"experts": of_its_own(stack, up=(2, INNER, WIDTH), down=(2, WIDTH, INNER))}
NORM = {**OF_MATRICES, "norm.weight": ("ffn",)}
SPLIT = {
    "up.weight": ("ffn", "embed"), "up.bias": ("ffn",), "down.weight": ("embed", "ffn"), "down.bias": ("embed",),
    "slope.weight": (None,),
}  # fmt: skip
LINEARS = {"up": linear(WIDTH, INNER, True), "down": linear(INNER, WIDTH, True), "slope": nn.PReLU}

Raw = made(feed, RAW, **SHAPES)  # all in one module, and a scale between the matrices
Split = made(split, SPLIT, LINEARS)  # the same in modules of their own
Named = made(split, SPLIT, LINEARS)  # called by names, the stream not first
Turned = made(lambda self, x: split(self, x).transpose(0, 1), SPLIT, LINEARS)  # the summands of other places
# a bias that may as well be a scale of what comes in
Biased = made(lambda self, x: feed(self, x) + self.bias, {**RAW, "bias": ("embed",)}, **SHAPES, bias=(WIDTH,))
Skip = made(  # a second way through the branch
    lambda self, x: feed(self, x) + self.skip(x),
    {**RAW, "skip.weight": ("embed", "embed")},
    {"skip": linear()},
    **SHAPES,
)
Normed = made(around("norm"), NORM, {"norm": lambda: nn.RMSNorm(INNER)}, **MATRICES)  # over all that is divided
OwnNormed = made(around("norm"), NORM, {"norm": of_its_own(own_norm, weight=(INNER,))}, **MATRICES)  # none of torch's
Sloped = made(  # the same axes as a norm's, but each element acts alone
    around("slope"),
    {**OF_MATRICES, "slope.by": ("ffn",)},
    {"slope": of_its_own(lambda self, x: x * self.by, by=(INNER,))},
    **MATRICES,
)
Shared, BothDivided = (  # a stack of experts that nothing divides, or that is divided as the shared one is
    made(
        beside,
        {**RAW, "experts.up": ("experts", ffn, "embed"), "experts.down": ("experts", "embed", ffn)},
        STACK,
        **SHAPES,
    )
    for ffn in (None, "ffn")
)
Heads = made(
    attention,
    {**dict.fromkeys(("q.weight", "k.weight", "v.weight"), ("heads", "embed")), "out.weight": ("embed", "heads")},
    {**dict.fromkeys(("q", "k", "v", "out"), linear()), "inner": CausalAttention},
)


class Columns(nn.Module):
    """Weights laid out the other way, (in, out)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Module(), nn.Module()
        self.up.weight = nn.Parameter(torch.empty(WIDTH, INNER))
        self.down.weight = nn.Parameter(torch.empty(INNER, WIDTH))
        self.down.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        return F.gelu(x @ self.up.weight) @ self.down.weight + self.down.bias

    axes = {"up.weight": ("embed", "ffn"), "down.weight": ("ffn", "embed"), "down.bias": ("embed",)}  # noqa: RUF012


class Block(nn.Module):
    def __init__(self, work, named):
        super().__init__()
        self.norm, self.work, self.named = nn.LayerNorm(WIDTH), work(), named

    def forward(self, x):
        return x + (self.work(scale=0.5, x=self.norm(x)) if self.named else self.work(self.norm(x)))


class NormedTable(nn.Embedding):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.norm = nn.RMSNorm(sizes[-1])

    def forward(self, tokens):
        return self.norm(super().forward(tokens))


class Model(nn.Module):
    """One such feed-forward a block. said: `places`, positions as a bare parameter; `temperature`, a parameter behind
    the head; `normed`, a table that norms what it looks up; `fold` and `flatten`, what is done to the stream."""

    def __init__(self, work=Split, branches=("blocks.*.work",), elementwise=(), **said):
        super().__init__()
        self.words = (NormedTable if "normed" in said else nn.Embedding)(64, WIDTH)
        self.blocks = nn.ModuleList(Block(work, work is Named) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.places = nn.Parameter(torch.empty(64, WIDTH)) if "places" in said else None
        self.temperature = nn.Parameter(torch.empty(1)) if "temperature" in said else None
        self.said, self.branches, self.elementwise, self.axes = said, branches, elementwise, work.axes

    def forward(self, tokens, positions=None):
        x = self.words(tokens)
        if self.places is not None:
            x = x + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if "fold" in self.said:  # as GPT-2 does: right while x has all tokens
            x = x.view(-1, tokens.shape[1], WIDTH)
        if "flatten" in self.said:
            return self.head(x.flatten(0, 1)).unflatten(0, tokens.shape)
        logits = self.head(x)
        return logits if self.temperature is None else logits * self.temperature

    def spec(self):
        own = {f"blocks.*.work.{name}": axes for name, axes in self.axes.items()}
        return ModelSpec(
            axes={
                **dict.fromkeys(("words.weight", "head.weight"), ("vocab", "embed")),
                "places": (None, "embed"),
                "words.norm.weight": ("embed",),
                "temperature": (None,),
                **own,
                "blocks.*.norm.*": ("embed",),
            },
            blocks=("blocks.*",),
            branches=self.branches,
            elementwise=self.elementwise,
            sizes={"heads": 4},
            attention="blocks.*.work.inner" if "q.weight" in self.axes else None,
            head="head",
            init={pattern: Normal(0.5) for pattern in ("*", "*.*", "*.*.*.*", "*.*.*.*.*", "*.*.*.*.*.*")},
        )


def outcome(ranks, model, options):
    (one,) = ranks.run(train, Trial(model), world=1)
    assert_same(ranks.run(train, Trial(model), {"tensor_parallel": options}, world=2), one)


ALL_LOGITS = pytest.param({"loss_parallel": False}, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, SLOW_WHOLE, ALL_LOGITS], ids=str)
@pytest.mark.parametrize(
    "work",
    [Raw, BothDivided, *(pytest.param(each, marks=pytest.mark.slow) for each in (Split, Named))],
    ids=("raw", "divided experts", "split", "named"),
)
def test_right(plait_ranks, work, options):
    outcome(plait_ranks, lambda: Model(work), options)


def test_a_parameter_that_acts_element_by_element(plait_ranks):
    outcome(plait_ranks, lambda: Model(Sloped, elementwise=("blocks.*.work.slope.by",)), {})


def test_a_parameter_between_flat_matrices(plait_ranks):
    outcome(plait_ranks, lambda: Model(Split, branches=()), {})
    with pytest.raises(RankError, match=r"'blocks\.0\.work\.slope\.weight' \(None,\) acts on the stream or between"):
        outcome(plait_ranks, lambda: Model(Split, branches=()), WHOLE)


@pytest.mark.parametrize("options", [{"loss_parallel": False}, {"loss_parallel": False, **WHOLE}], ids=str)
def test_a_parameter_behind_the_head(plait_ranks, options):
    """All ranks have all logits there, so all find the whole of its gradient."""
    outcome(plait_ranks, lambda: Model(temperature=True), options)


def test_positions_as_a_bare_parameter(plait_ranks):
    outcome(plait_ranks, lambda: Model(places=True), WHOLE)
    with pytest.raises(RankError, match=r"'places' \(None, embed\) belongs to a module that holds others"):
        outcome(plait_ranks, lambda: Model(places=True), {})


def test_a_flattened_stream(plait_ranks):
    outcome(plait_ranks, lambda: Model(flatten=True), {**WHOLE, "loss_parallel": False})
    with pytest.raises(RankError, match=r"PlaitError: the residual stream has 2 dims at 'head', \(\d+, 16\)"):
        outcome(plait_ranks, lambda: Model(flatten=True), {})


@pytest.mark.parametrize("chunks", [1, 2])
def test_tokens_folded_into_the_batch(plait_ranks, chunks):
    """The loss of the first step is off by a little, gradients by as much as they are large."""
    outcome(plait_ranks, lambda: Model(fold=True), WHOLE)
    says = r"'head' computes logits of \(4, 32\) \(batch, tokens\), but the ids that were looked up are \(8, 16\)"
    with pytest.raises(RankError, match=f"PlaitError: {says}"):
        plait_ranks.run(train, Trial(lambda: Model(fold=True), chunks=chunks), {"tensor_parallel": {}}, world=2)


@pytest.mark.parametrize("options", [{}, SLOW_WHOLE], ids=str)
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: Model(Heads), r"'blocks\.0\.work\.inner' got queries of \(8, 4, 16, 2\), but this rank has 2 of the"),
        (lambda: Model(Turned), r"the branch 'blocks\.0\.work' returns \(16, 8, 16\) for a stream of \(8, 16, 16\)"),
    ],
)  # fmt: skip
def test_what_a_branch_gets_and_returns(plait_ranks, model, says, options):
    with pytest.raises(RankError, match=f"PlaitError: .*{says}"):
        plait_ranks.run(train, Trial(model), {"tensor_parallel": options}, world=2)


@pytest.mark.parametrize("options", [{}, SLOW_WHOLE], ids=str)
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: Model(Biased), r"cannot tell whether 'blocks\.0\.work\.bias' \(embed,\) is the bias of a matrix"),
        (lambda: Model(Columns), r"cannot tell whether 'blocks\.0\.work\.down\.bias' \(embed,\) is the bias"),
        (lambda: Model(normed=True), r"divides 'words\.weight' \(vocab, embed\), and 'words\.norm' inside its module"),
        (lambda: Model(Skip), r"'blocks\.0\.work\.skip\.weight' \(embed, embed\) writes to the stream undivided"),
        (lambda: Model(Normed), r"'blocks\.0\.work\.norm\.weight' \(ffn,\) lies along an axis that .* divides"),
        (lambda: Model(OwnNormed), r"'blocks\.0\.work\.norm\.weight' \(ffn,\) lies along an axis that .* divides"),
        (lambda: Model(Sloped), r"'blocks\.0\.work\.slope\.by' \(ffn,\) lies along an axis that .* divides"),
        (lambda: Model(Shared), r"'blocks\.0\.work\.experts\.\w+' \(experts, .*\) writes to the stream undivided"),
        (lambda: Model(branches=("blocks.*",)), r"the branch 'blocks\.0', which is the block 'blocks\.0'"),
        (lambda: Model(branches=("blocks.*.work", "*.*.work.up")), r"which holds the branch 'blocks\.0\.work\.up'"),
    ],
)  # fmt: skip
def test_refused(plait_ranks, model, says, options):
    with pytest.raises(RankError, match=f"PlaitError: .*{says}"):
        plait_ranks.run(train, Trial(model), {"tensor_parallel": options}, world=2)


def test_said_before_a_rank_starts():
    from plait.contract.config import Config
    from plait.parallel.assembly import assemble_model
    from plait_tensor_parallel import TensorParallel

    def said(work):
        """A spec may name each parameter in full."""
        with torch.device("meta"):
            model = Model(work)
        spec = model.spec()
        spec = attrs.evolve(spec, axes={name: spec.axes_of(name) for name, _ in model.named_parameters()})
        assembly = assemble_model(model, spec, {"tensor_parallel": TensorParallel()}, Config(), 2, "cpu")
        with pytest.raises(PlaitError) as caught:
            assembly.layout  # noqa: B018
        return str(caught.value)

    assert "writes to the stream undivided" in said(Skip)
    assert "'blocks.0.work.norm.weight' (ffn,) lies along an axis that" in said(Normed)


def test_a_vector_beside_a_matrix_is_not_what_it_reads():
    first, second = ("latent", "heads"), ("embed", "latent")
    assert is_second(second, [first])
    assert not is_second(second, [("heads",), ("latent",)])
    assert not is_second(("latent",), [first])
