"""A loss of a plugin: what it may return, who is named if it fails, and where it runs: compiled, planned, checked."""

import sys

import attrs
import cloudpickle
import pytest
import torch

from plait import PlaitError
from plait.host import compose
from plait.parallel.plugin_loss import PluginLoss
from plait.parallel.vocab import Vocab
from plait_testing.parity import worst_gradient
from plait_testing.trial import Trial, train
from tests.helpers.fakes import distribution, forget

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test


@attrs.frozen
class Returning:
    """A loss that returns what a function makes of its logits."""

    make: object

    def summed(self, logits, labels, vocab):
        return self.make(logits)


def refusal(make, chunks=False):
    loss = PluginLoss("mine", Returning(make), lambda plain, fullgraph: plain)
    logits, labels = torch.randn(2, 3, 5, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(Exception) as caught:
        loss.of_chunk(logits[0], labels[0], None, True) if chunks else loss(logits, labels)
    return caught.value


RETURNED = {
    "None": (lambda z: None, "returned None"),
    "a number": (lambda z: 3.5, "returned 3.5"),
    "a loss per token": (lambda z: z.logsumexp(-1), "returned a tensor of (2, 3) in torch.float32"),
    "bfloat16": (lambda z: z.bfloat16().sum(), "returned a tensor of () in torch.bfloat16"),
    "a count": (lambda z: z.argmax(), "returned a tensor of () in torch.int64"),
    "a copy": (lambda z: z.detach().sum(), "does not depend on the logits"),
    "a constant": (lambda z: torch.ones(()), "does not depend on the logits"),
}


@pytest.mark.parametrize("case", RETURNED)
def test_what_a_loss_may_not_return(case):
    make, said = RETURNED[case]
    error = refusal(make)
    assert isinstance(error, PlaitError)
    assert said in str(error)
    assert str(error).startswith("loss 'mine' returned ")
    assert "method 'summed'" in str(error)


@pytest.mark.parametrize("case", ["a number", "bfloat16", "a copy"])
def test_by_chunks_it_may_not_either(case):
    make, said = RETURNED[case]
    assert said in str(refusal(make, chunks=True))


def test_who_raised_is_named():
    error = refusal(lambda z: z.reshape(7))
    assert "raised by loss 'mine' in its method 'summed'" in error.__notes__
    error = refusal(lambda z: sys.exit(3))
    assert isinstance(error, PlaitError)
    assert str(error).startswith("loss 'mine' ")


@attrs.frozen
class Smoothed:
    """Label smoothing with the three sums of a vocabulary. `broken`: it breaks a compiler's graph."""

    smoothing: float = 0.2
    broken: bool = False
    sharded = True

    def summed(self, logits, labels, vocab):
        if self.broken:
            torch._dynamo.graph_break()
        counts = labels != -100
        toward = (1 - self.smoothing) * vocab.pick(logits, labels) + self.smoothing * vocab.sum(logits) / vocab.size
        return (vocab.logsumexp(logits) - toward).where(counts, 0).sum()


def of_torch(logits, labels):
    smoothed = {"reduction": "sum", "ignore_index": -100, "label_smoothing": 0.2}
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **smoothed)


@pytest.mark.parametrize("chunks", [1, 3, 7])
def test_the_sums_of_a_vocabulary_are_torchs(chunks):
    """Label smoothing, from logits and in its gradient; 5 tokens by 7 chunks: some have none."""
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100, 10, 0, 3])
    loss = PluginLoss("smoothed", Smoothed(), lambda plain, fullgraph: plain)
    expected = of_torch(logits, labels)
    (want,) = torch.autograd.grad(expected, logits)
    parts = zip(logits.detach().tensor_split(chunks), labels.tensor_split(chunks), strict=True)
    found = [loss.of_chunk(*part, None, True) for part in parts]
    torch.testing.assert_close(sum(value for value, _ in found), expected.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found]), want, rtol=1e-13, atol=1e-15)
    value, same = loss.of_chunk(logits.detach(), labels, None, False)
    assert not value.requires_grad
    assert torch.equal(same, logits)


def test_half_precision_is_summed_in_float32():
    logits = torch.randn(4, 64).bfloat16().requires_grad_()
    labels, vocab = torch.tensor([1, 2, -100, 63]), Vocab(64)
    sums = vocab.logsumexp(logits), vocab.pick(logits, labels), vocab.sum(logits)
    assert {each.dtype for each in sums} == {torch.float32}
    exact = logits.detach().float()
    torch.testing.assert_close(sums[0], exact.logsumexp(-1))
    assert torch.equal(sums[1], exact[range(4), labels.clamp(min=0)].where(labels != -100, 0))
    torch.testing.assert_close(sums[2], exact.sum(-1))


@pytest.mark.parametrize("chunks", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("broken", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_it_is_the_same(plait_ranks, chunks, broken):
    """A break of its graph, which its author may not see, costs time and nothing else."""
    trial = Trial(steps=1, chunks=chunks, loss={"smoothed": Smoothed(broken=broken)})
    (plain,) = plait_ranks.run(train, trial, world=1)
    (found,) = plait_ranks.run(train, attrs.evolve(trial, compile="aot_eager"), world=1)
    assert worst_gradient(found, plain)[0] <= 1e-12


def graphs(chunks):
    """How often the loss was compiled in two steps of four micro-batches."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    loss = PluginLoss("smoothed", Smoothed(), lambda plain, fullgraph: torch.compile(plain, backend=counter))
    for _ in range(4):
        logits = torch.randn(8, 16, requires_grad=True)
        labels = torch.randint(16, (8,))
        if chunks == 1:
            loss(logits, labels).backward()
        else:
            for part in zip(logits.detach().split(4), labels.split(4), strict=True):
                loss.of_chunk(*part, None, True)
    return counter.frame_count


@pytest.mark.parametrize("chunks", [1, 2])
def test_it_is_compiled_once(plait_ranks, chunks):
    assert plait_ranks.run(graphs, chunks, world=1) == [1]


CODE = """
import attrs

@attrs.frozen
class Squares:
    weight: float = attrs.field(default=0.1, validator=attrs.validators.ge(0))
    def summed(self, logits, labels, vocab):
        {body}
"""
BODY = "return self.weight * logits[labels != -100].square().sum()"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a loss `squares` whose method has this body."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def install(body=BODY):
        distribution(tmp_path, "plait-squares", code=CODE.format(body=body))
        entries = tmp_path / "plait_squares-1.0.dist-info" / "entry_points.txt"
        entries.write_text("[plait.losses]\nsquares = plait_squares:Squares\n")

    yield install
    forget(tmp_path)


SMALL = ("launch.device=cpu", "model.n_layers=1", "train.seq_len=16", "train.local_batch_size=2", "train.steps=2")
TRAIN = (*SMALL, "schedule.warmup_steps=0", "validation.batches=1", "metrics.tensorboard=false")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("weight=-1.0", "loss.function.squares.weight must be >= 0: -1.0"),
        ("weight=much", "loss.function.squares.weight is 'much'; it must be a number"),
        ("much=1.0", "unknown key loss.function.squares.much; available: weight"),
    ],
)
def test_options_are_checked_before_ranks_start(installed, plait_project, option, said):
    installed()
    done = plait_project("train", *TRAIN, f"+loss.function.squares.{option}")
    assert (done.code, done.err) == (1, f"plait: {said}\n")
    assert [line.partition(":")[0] for line in done.out.splitlines()] == ["check"]


def test_an_unknown_loss_is_refused(plait_project):
    done = plait_project("train", *TRAIN, "+loss.function.squares.weight=1.0")
    assert done.code == 1
    assert "loss 'squares' is not installed" in done.err


def test_a_plan_has_its_operators(installed):
    """What it computes is planned: no softmax, but squares of the tokens that count."""
    from plait.host import check
    from plait_plan.tracing.recording import recording

    def names(*extra):
        config = check(compose([*SMALL, *extra])).config
        with recording(config, config.strategy, 1, 0, 1, lambda model, spec: config) as recorded:
            recorded.step()
            return {o.name for o in recorded.recorder.operators if o.phase == "loss"}

    installed("return self.weight * logits.square().where((labels != -100)[..., None], 0).sum()")
    core, own = names(), names("+loss.function.squares.weight=1.0")
    assert "aten::_log_softmax" in core - own
    assert "aten::pow" in own - core
