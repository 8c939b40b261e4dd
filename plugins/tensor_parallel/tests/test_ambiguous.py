"""What axes do not tell is refused, or right; it is never wrong in silence."""

import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait import ModelSpec, PlaitError
from plait.models.init import Normal
from plait.testing.parity import apart, worst_gradient
from plait.testing.pool import RankError
from plait.testing.trial import Trial, train
from plait_tensor_parallel.ambiguous import is_second

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

WIDTH, INNER = 16, 32
WHOLE = {"sequence_parallel": False}


class Raw(nn.Module):
    """All of a feed-forward's parameters in one module, and a scale between its matrices."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(INNER, WIDTH)), nn.Parameter(torch.empty(WIDTH, INNER))
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.up)) * self.scale, self.down)

    axes = {"up": ("ffn", "embed"), "down": ("embed", "ffn"), "scale": (None,)}  # noqa: RUF012


class Biased(Raw):
    """The same with a bias, which may as well be a scale of what comes in."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        return super().forward(x) + self.bias

    axes = {**Raw.axes, "bias": ("embed",)}  # noqa: RUF012


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


class Skip(Raw):
    """A second way through the branch."""

    def __init__(self):
        super().__init__()
        self.skip = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x) + self.skip(x)

    axes = {**Raw.axes, "skip.weight": ("embed", "embed")}  # noqa: RUF012


class Normed(Raw):
    """A norm over all that is divided."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(INNER)

    def forward(self, x):
        return F.linear(self.norm(F.linear(x, self.up)), self.down)

    axes = {**Raw.axes, "norm.weight": ("ffn",)}  # noqa: RUF012


class OwnNorm(nn.Module):
    """A norm that is none of torch's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(INNER))

    def forward(self, x):
        return x * self.weight / x.pow(2).mean(-1, keepdim=True).sqrt()


class OwnNormed(Normed):
    def __init__(self):
        super().__init__()
        self.norm: Any = OwnNorm()


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.empty(INNER))

    def forward(self, x):
        return x * self.by


class Sloped(Raw):
    """The same axes as a norm's, but each element acts alone."""

    def __init__(self):
        super().__init__()
        self.slope = Slope()

    def forward(self, x):
        return F.linear(self.slope(F.linear(x, self.up)), self.down)

    axes = {**Raw.axes, "slope.by": ("ffn",)}  # noqa: RUF012


class Stack(nn.Module):
    """Experts, each of which sees every token."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(2, INNER, WIDTH)), nn.Parameter(torch.empty(2, WIDTH, INNER))

    def forward(self, x):
        return torch.einsum("btxf,xdf->btd", F.gelu(torch.einsum("btd,xfd->btxf", x, self.up)), self.down)


class Shared(Raw):
    """A stack of experts that nothing divides, beside a shared one that is divided."""

    def __init__(self):
        super().__init__()
        self.experts = Stack()

    def forward(self, x):
        return super().forward(x) + self.experts(x)

    axes = {**Raw.axes, "experts.up": ("experts", None, "embed"), "experts.down": ("experts", "embed", None)}  # noqa: RUF012


class BothDivided(Shared):
    axes = {**Raw.axes, "experts.up": ("experts", "ffn", "embed"), "experts.down": ("experts", "embed", "ffn")}  # noqa: RUF012


class Split(nn.Module):
    """Divided matrices in modules of their own, and a slope between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.slope = nn.PReLU()

    def forward(self, x):
        return self.down(self.slope(self.up(x)))

    axes = {  # noqa: RUF012
        "up.weight": ("ffn", "embed"),
        "up.bias": ("ffn",),
        "down.weight": ("embed", "ffn"),
        "down.bias": ("embed",),
        "slope.weight": (None,),
    }


class Named(Split):
    """Called by names, the stream not first."""

    def forward(self, x, scale=None):
        return super().forward(x) if scale is None else super().forward(x) * scale


class Turned(Split):
    """Returns the summands of other tokens' places."""

    def forward(self, x):
        return super().forward(x).transpose(0, 1)


class Inner(nn.Module):
    def forward(self, q, k, v, positions=None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Heads(nn.Module):
    """Attention whose view has the number of heads: on a rank that has half of them, heads of half the width."""

    def __init__(self, count=4):
        super().__init__()
        self.count = count
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.inner, self.out = Inner(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (w(x).view(*x.shape[:2], self.count, -1).transpose(1, 2) for w in self.qkv)
        return self.out(self.inner(q, k, v).transpose(1, 2).flatten(-2))

    axes = {"qkv.*.weight": ("heads", "embed"), "out.weight": ("embed", "heads")}  # noqa: RUF012


class Block(nn.Module):
    def __init__(self, work, named):
        super().__init__()
        self.norm, self.work, self.named = nn.LayerNorm(WIDTH), work(), named

    def forward(self, x):
        return x + (self.work(scale=0.5, x=self.norm(x)) if self.named else self.work(self.norm(x)))


class Model(nn.Module):
    """One such feed-forward a block; flat: the spec names no branches; temperature: a parameter behind the head."""

    def __init__(
        self,
        work=Split,
        flat=False,
        places=False,
        temperature=False,
        flatten=False,
        branches=None,
        fold=None,
        elementwise=(),
    ):
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(work, work is Named) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.places = nn.Parameter(torch.empty(64, WIDTH)) if places else None
        self.temperature = nn.Parameter(torch.empty(1)) if temperature else None
        self.elementwise = elementwise
        self.flatten, self.fold, self.axes = flatten, fold, work.axes
        self.branches = branches if branches is not None else () if flat else ("blocks.*.work",)

    def forward(self, tokens, positions=None):
        x = self.words(tokens)
        if self.places is not None:
            x = x + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.fold:  # as GPT-2 does: right while x has all tokens
            x = x.view(-1, tokens.shape[1], WIDTH)
        if self.flatten:
            return self.head(x.flatten(0, 1)).unflatten(0, tokens.shape)
        logits = self.head(x)
        return logits if self.temperature is None else logits * self.temperature

    def spec(self):
        own = {f"blocks.*.work.{name}": axes for name, axes in self.axes.items()}
        return ModelSpec(
            axes={
                "words.weight": ("vocab", "embed"),
                "places": (None, "embed"),
                "temperature": (None,),
                "head.weight": ("vocab", "embed"),
                **own,
                "blocks.*.norm.*": ("embed",),
            },
            blocks=("blocks.*",),
            branches=self.branches,
            elementwise=self.elementwise,
            sizes={"heads": 4},
            attention="blocks.*.work.inner" if "qkv.*.weight" in self.axes else None,
            head="head",
            init={pattern: Normal(0.5) for pattern in ("*", "*.*", "*.*.*.*", "*.*.*.*.*", "*.*.*.*.*.*")},
        )


def outcome(ranks, model, options):
    (one,) = ranks.run(train, Trial(model), world=1)
    for result in ranks.run(train, Trial(model), {"tensor_parallel": options}, world=2):
        error, name = worst_gradient(result, one)
        assert error <= 1e-10, f"{name} is off by {error:.2e}"
        assert apart(result.norms, one.norms)[0] <= 1e-9


@pytest.mark.parametrize("options", [{}, WHOLE, {"loss_parallel": False}], ids=str)
@pytest.mark.parametrize("work", [Raw, Split, Named, BothDivided])
def test_right(plait_ranks, work, options):
    outcome(plait_ranks, lambda: Model(work), options)


def test_a_parameter_that_acts_element_by_element(plait_ranks):
    outcome(plait_ranks, lambda: Model(Sloped, elementwise=("blocks.*.work.slope.by",)), {})


def test_a_parameter_between_flat_matrices(plait_ranks):
    outcome(plait_ranks, lambda: Model(Split, flat=True), {})
    with pytest.raises(RankError, match=r"'blocks\.0\.work\.slope\.weight' \(None,\) acts on the stream or between"):
        outcome(plait_ranks, lambda: Model(Split, flat=True), WHOLE)


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


@pytest.mark.parametrize("options", [{}, WHOLE], ids=str)
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


@pytest.mark.parametrize("options", [{}, WHOLE], ids=str)
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: Model(Biased), r"cannot tell whether 'blocks\.0\.work\.bias' \(embed,\) is the bias of a matrix"),
        (lambda: Model(Columns), r"cannot tell whether 'blocks\.0\.work\.down\.bias' \(embed,\) is the bias"),
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

    with torch.device("meta"):
        model = Model(Skip)
    assembly = assemble_model(model, model.spec(), {"tensor_parallel": TensorParallel()}, Config(), 2, "cpu")
    with pytest.raises(PlaitError, match="writes to the stream undivided"):
        assembly.layout  # noqa: B018


def test_a_vector_beside_a_matrix_is_not_what_it_reads():
    first, second = ("latent", "heads"), ("embed", "latent")
    assert is_second(second, [first])
    assert not is_second(second, [("heads",), ("latent",)])
    assert not is_second(("latent",), [first])
