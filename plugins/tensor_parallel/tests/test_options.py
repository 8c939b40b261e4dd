"""Options of tensor_parallel: the same numbers either way, and sentences for what does not fit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import ModelSpec
from plait.ops import Normal
from plait.testing import assert_same, raises_about
from plait_tensor_parallel import TensorParallel
from plait_testing.models import MODELS, llama3
from plait_testing.pool import Pool, RankError
from plait_testing.trial import Trial, batch, forward_backward, train

OFF = {"sequence_parallel": False, "loss_parallel": False}


def same(ranks, trial, options, world=2, beside=None):
    (one,) = ranks.once(train, Trial(trial.model, steps=trial.steps), world=1)
    assert_same(ranks.run(train, trial, {"tensor_parallel": options, **(beside or {})}, world=world), one)


ONE = [{"sequence_parallel": False}, {"loss_parallel": False}]


WAYS = [(model, options) for model in MODELS for options in (*ONE, OFF)]
OFTEN = [("tied", ONE[0]), ("moe", OFF)]


@pytest.mark.parametrize(
    ("model", "options"), [way if way in OFTEN else pytest.param(*way, marks=pytest.mark.slow) for way in WAYS], ids=str
)
def test_off_computes_the_same(plait_ranks, model, options):
    same(plait_ranks, Trial(model), options)


@pytest.mark.slow
def test_fewer_key_heads_than_ranks(plait_ranks):
    same(plait_ranks, Trial("llama3"), {"degree": 4}, world=4)  # 2 of them


def sums():
    """(dtype, elements) of every sum over ranks in a mixed-precision step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(t.__name__ == "DTensor" for t in types):
                return NotImplemented
            if func is torch.ops._c10d_functional.all_reduce.default:
                seen.append((args[0].dtype, args[0].numel()))
            return func(*args, **(kwargs or {}))

    trial = Trial("llama3", dtype="mixed")
    applied = trial.apply({"tensor_parallel": {}})
    with Watch():
        forward_backward(applied, trial, 0)
    return seen


def test_gradients_of_norms_are_summed_in_the_reduce_dtype(plait_ranks):
    for seen in plait_ranks.run(sums, world=2):
        assert [dtype for dtype, elements in seen if elements == 32] == 5 * [torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OFF], ids=str)
@pytest.mark.parametrize("model", list(MODELS))
def test_four_ranks(plait_ranks, model, options):
    same(plait_ranks, Trial(model), {"degree": 4, **options}, world=4)


@pytest.mark.slow
def test_hybrid_shards_beside_tensor_ranks():
    pytest.importorskip("plait_fsdp2")
    ranks = Pool(8)
    try:
        same(ranks, Trial("llama3"), {}, world=8, beside={"fsdp2": {"replicate": 2}})
        same(ranks, Trial("tied"), OFF, world=8, beside={"fsdp2": {"replicate": 2}})
    finally:
        ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OFF], ids=str)
def test_compiled(plait_ranks, options):
    same(plait_ranks, Trial("odd", compile="aot_eager"), options)


class Scale(nn.Module):
    """A branch without anything to divide."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x, *, by):
        return x.flip(1) * self.weight * by  # mixes tokens, so it needs the whole sequence


class Odds(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.write = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = Scale(16)

    def forward(self, x):
        x = x + self.write(F.gelu(self.read(x)))
        return x + self.scale(x=x, by=0.5)


class Places(nn.Embedding):
    """Called with a mask first, as that of OPT."""

    def forward(self, mask, places):  # type: ignore[override] # other arguments are the point
        return super().forward(places)


class Masked(nn.Module):
    """An embedding and positions, which are looked up by what is not the first argument."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(64, 16), Places(64, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, tokens, positions=None):
        mask = torch.ones(tokens.shape, device=tokens.device)
        return self.head(self.words(tokens) + self.places(mask, (mask.cumsum(1) - 1).long()))

    def spec(self):
        return ModelSpec(
            axes={
                "words.weight": ("vocab", "embed"),
                "places.weight": (None, "embed"),
                "head.weight": ("vocab", "embed"),
                "head.bias": ("vocab",),
            },
            init={"*.*": Normal(0.5)},
        )


@pytest.mark.parametrize("options", [{}, pytest.param(OFF, marks=pytest.mark.slow)], ids=str)
def test_positions_that_a_mask_precedes(plait_ranks, options):
    same(plait_ranks, Trial(Masked), {"degree": 2, **options})


class Flat(nn.Module):
    """A feed-forward outside of branches, a branch that is called by names, padding, positions that have no batch."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(64, 16, padding_idx=40), nn.Embedding(64, 16)
        self.steps = nn.ModuleList([Odds(), Odds()])
        self.head = nn.Linear(16, 64)

    def forward(self, tokens, positions=None):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for step in self.steps:
            x = step(x)
        return self.head(x)

    def spec(self):
        return ModelSpec(
            axes={
                "words.weight": ("vocab", "embed"),
                "places.weight": (None, "embed"),
                "steps.*.read.weight": ("ffn", "embed"),
                "steps.*.read.bias": ("ffn",),
                "steps.*.write.weight": ("embed", "ffn"),
                "steps.*.write.bias": ("embed",),
                "steps.*.scale.weight": ("embed",),
                "head.weight": ("vocab", "embed"),
                "head.bias": ("vocab",),
            },
            blocks=("steps.*",),
            branches=("steps.*.scale",),
            init={"*.*": Normal(0.5), "*.*.*.*": Normal(0.5)},
        )


@pytest.mark.parametrize(
    ("options", "world"), [({}, 2), (OFF, 2), *(pytest.param(o, 4, marks=pytest.mark.slow) for o in ({}, OFF))], ids=str
)
def test_what_stands_outside_branches(plait_ranks, world, options):
    same(plait_ranks, Trial(Flat), {"degree": world, **options}, world=world)


@pytest.mark.slow
def test_a_flat_model_beside_fsdp2_compiled(plait_ranks):
    pytest.importorskip("plait_fsdp2")
    same(plait_ranks, Trial(Flat, compile="aot_eager"), {}, world=4, beside={"fsdp2": {}})


@pytest.mark.parametrize("options", [*(pytest.param(one, marks=pytest.mark.slow) for one in ONE), OFF])
def test_the_loss_by_chunks(plait_ranks, options):
    """Of a tied head with a bias."""
    same(plait_ranks, Trial("odd", steps=2, chunks=3), options)


def largest_logits():
    """Numbers of the largest tensor with a column a token of the whole vocabulary: without and with the option."""
    from torch._subclasses import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from plait.ops import cross_entropy_sum, loss_context

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(t.__name__ == "DTensor" for t in types):
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            found = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor)]
            seen.extend((t.numel(), str(func)) for t in found if t.shape[-1:] == (1024,) and t.device.type != "meta")
            return result

    def of(options):
        seen.clear()
        applied = Trial(Wide, dtype="float32").apply({"tensor_parallel": options})
        tokens, labels = batch(0)
        with Watch():
            logits = applied.parts[0](tokens)
            with loss_context(logits):
                cross_entropy_sum(logits, labels).backward()
        return max(seen, default=(0, ""))

    return of({"loss_parallel": False}), of({})


def Wide():
    return llama3(vocab_size=1024)


def test_no_rank_ever_holds_all_logits(plait_ranks):
    for without, with_it in plait_ranks.run(largest_logits, world=2):
        assert without[0] == 8 * 16 * 1024
        assert with_it == (0, "")


def applied_to(model, options, **settings):
    with torch.device("meta"):
        built = model()
    return plait.apply(built, built.spec(), [TensorParallel(**options)], **{"seq_len": 16, **settings})


KEY = "strategy.tensor_parallel"
MISFITS = [
    (f"{KEY}.degree=3", (f"{KEY}.degree", 3, (1, 2, 4, 8))),
    (f"{KEY}.degree=4 model.n_heads=2 model.n_kv_heads=2", (f"{KEY}.degree", 4, (1, 2))),
    (f"{KEY}.degree=4 model.ffn_dim=650", (f"{KEY}.degree", 4, (1, 2))),
    (f"{KEY}.degree=8 model.n_heads=24 model.dim=384 model.n_kv_heads=3", (f"{KEY}.degree", 8)),
    ("train.seq_len=255", ("train.seq_len", 255, (254, 256))),
    (f"{KEY}.async_tp=true launch.device=cpu", (f"{KEY}.async_tp", True, (False,))),
    (f"{KEY}.degree=0", (f"{KEY}.degree", 0, ">= 1")),
]


@pytest.mark.parametrize(("overrides", "about"), MISFITS)
def test_what_does_not_fit_is_said_before_a_rank_starts(overrides, about):
    from plait.host import check, compose

    with raises_about(*about):
        check(compose(["strategy=[tensor_parallel]", *overrides.split()]))


def test_only_degrees_that_divide_everything_are_said_to_fit():
    from plait.host import check, compose

    with pytest.raises(plait.PlaitError) as caught:
        check(compose(["strategy=[tensor_parallel]", f"{KEY}.degree=3"]))
    assert caught.value.fits == (1, 2, 4, 8)


def test_a_sequence_need_not_be_divided_where_it_stays_whole():
    from plait.host import check, compose

    check(
        compose(["strategy=[tensor_parallel]", "train.seq_len=255", "strategy.tensor_parallel.sequence_parallel=false"])
    )


def too_long():
    applied_to(llama3, {}).parts[0](torch.zeros(1, 15, dtype=torch.int64))


def test_a_sequence_that_is_not_divided_is_refused_when_it_comes(plait_ranks):
    with pytest.raises(RankError, match="PlaitError: at 'tok_embeddings' a sequence of 15 tokens is not divisible by"):
        plait_ranks.run(too_long, world=2)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_a_lookup_that_needs_all_tokens_is_refused(plait_ranks, option):
    def words():
        model = Flat()
        model.words = nn.Embedding(64, 16, **option)
        return model

    with pytest.raises(RankError, match="Embedding with max_norm or scale_grad_by_freq cannot be divided over ranks"):
        plait_ranks.run(applied_to, words, {}, world=2)


class Softmax(nn.Module):
    def forward(self, x):
        return x.softmax(-1)


class Hidden(Flat):
    """Its last module needs whole rows of logits, which are sharded."""

    def __init__(self):
        super().__init__()
        self.last = Softmax()

    def forward(self, tokens, positions=None):
        return self.last(super().forward(tokens))


def run_hidden(options):
    applied_to(Hidden, options).parts[0](batch(0)[0])


def test_explicit_names_the_module_that_moves_data(plait_ranks):
    plait_ranks.run(run_hidden, {}, world=2)
    with pytest.raises(RankError, match=r"in module 'last': strategy\.tensor_parallel\.explicit=true"):
        plait_ranks.run(run_hidden, {"explicit": True}, world=2)


@pytest.mark.parametrize("compile", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_explicit_lets_the_models_train(plait_ranks, compile):
    for model in ("llama3", "odd"):
        same(plait_ranks, Trial(model, compile=compile), {"explicit": True})


def left_on(options):
    from torch.distributed.tensor._utils import ExplicitRedistributionContext

    with pytest.raises(RuntimeError):
        run_hidden(options)
    return getattr(ExplicitRedistributionContext._local, "_active", None)


def test_explicit_ends_with_forward_even_where_it_fails(plait_ranks):
    assert plait_ranks.run(left_on, {"explicit": True}, world=2) == [None, None]


def _overlap() -> tuple[bool, bool]:
    import torch._inductor.config as inductor
    from torch.distributed.device_mesh import init_device_mesh

    from plait_tensor_parallel.torch_internals import allow_overlap, overlapping

    allow_overlap(init_device_mesh("cpu", (2,)).get_group().group_name)
    with overlapping():
        inside = inductor._micro_pipeline_tp
    return inside, inductor._micro_pipeline_tp


def test_inductor_splits_products_only_inside(plait_ranks):
    """`async_tp` itself needs GPUs; this sees whether torch still has what it stands on."""
    assert plait_ranks.run(_overlap, world=2) == [(True, False)] * 2
