"""A stranger's pipeline computes what one process computes, and what it writes is of the whole model."""

import functools
import itertools
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import plait
from plait.parallel.stages import stage
from plait.testing import assert_same
from plait_models.llama3 import Llama3
from plait_testing.models import llama3, moe
from plait_testing.models.odd import Odd
from plait_testing.parity import unequal
from plait_testing.pool import RankError
from plait_testing.trial import Trial, full, held, of_all_stages, take_step, train
from tests.helpers import gpipe

LAYERS = functools.partial(llama3, n_layers=4)
FSDP2 = {"fsdp2": {}}


def untied_odd():
    """Biases, two embeddings, a buffer of the root: in its blocks, with a head of its own."""
    model = Odd(depth=4)
    model.readout = nn.Linear(model.readout.in_features, model.readout.out_features)
    return model


def like(cls):
    """A tiny model of this class."""
    tiny = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}
    return cls(vocab_size=64, **tiny)


class Unnamed(Llama3):
    def spec(self):
        return attrs.evolve(super().spec(), before=(), after=())


class Twice(Llama3):
    def forward(self, tokens, positions=None):
        x = self.tok_embeddings(tokens)
        turns = self.rope(tokens, positions, x.dtype)
        for block in [*self.layers.values(), *self.layers.values()]:
            x = block(x, positions, turns)
        return self.output(self.norm(x))


class Backwards(Llama3):
    def forward(self, tokens, positions=None):
        x = self.tok_embeddings(tokens)
        turns = self.rope(tokens, positions, x.dtype)
        for block in reversed([*self.layers.values()]):
            x = block(x, positions, turns)
        return self.output(self.norm(x))


class Kinds(Llama3):
    """Asks each block what it is before it calls it, as hybrids of transformers do."""

    def __init__(self, **options):
        super().__init__(**options)
        for number, block in enumerate(self.layers.values()):
            vars(block)["kind"] = ("attention", "recurrence")[number % 2]

    def forward(self, tokens, positions=None):
        x = self.tok_embeddings(tokens)
        turns = self.rope(tokens, positions, x.dtype)
        for block in self.layers.values():
            x = block(x, positions if block.kind == "attention" else None, turns)
        return self.output(self.norm(x))


def test_blocks_of_other_stages_say_what_they_are():
    model, tokens = like(Kinds), torch.arange(8)[None]
    wanted, spec = model(tokens), model.spec()
    first, last = (stage(model, spec, *blocks) for blocks in ((0, 2), (2, 4)))
    assert torch.equal(last(tokens, stream=first(tokens)), wanted)


class SeesFirst:
    """Mixed into a block: called with what the embedding returned, too."""

    def forward(self, x, documents, turns, first):
        plain: Any = super()
        return plain.forward(x + first, documents, turns)


class Original(Llama3):
    def __init__(self, **options):
        super().__init__(**options)
        for block in self.layers.values():
            plait.mix_in(block, SeesFirst)

    def forward(self, tokens, positions=None):
        x = first = self.tok_embeddings(tokens)
        turns = self.rope(tokens, positions, x.dtype)
        for block in self.layers.values():
            x = block(x, positions, turns, first)
        return self.output(self.norm(x))


def piped(trial, strategies, degree=2):
    return train(trial, strategies, [gpipe.GPipe(degree)])


CASES = {  # pipeline's test_steps.py has more
    "four stages, five blocks": (Trial(functools.partial(llama3, n_layers=5), micro=2), {}, 4),
    "experts, balance loss": (Trial(functools.partial(moe, n_layers=4), micro=2), FSDP2, 2),
    "divided vocabulary and stream": (Trial(LAYERS, micro=2), {**FSDP2, "tensor_parallel": {"degree": 2}}, 2),
    "other names, biases, two embeddings": (Trial(untied_odd, micro=2), FSDP2, 2),
}
QUICK = ("experts, balance loss",)


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_stages_equal_one_process(plait_ranks, case):
    trial, strategies, degree = CASES[case]
    plain = attrs.evolve(trial, micro=1, chunks=1)
    expected = plait_ranks.once(train, plain, world=1, name=f"one process: {case}")[0]
    results = plait_ranks.run(piped, trial, strategies, degree, world=4)
    assert_same(results, expected)
    saved = set(trial.build().state_dict())
    for result in results:
        buffers = ({name: b for name, b in each.buffers.items() if name in saved} for each in (result, expected))
        assert unequal(*buffers) is None


def counts(strategies, extra):
    """What the metrics of a step say of the experts."""
    trial = CASES["experts, balance loss"][0]
    applied = trial.apply(strategies, extra)
    take_step(applied, trial.optimizer(applied.parameters()), trial, 0)
    return applied.balance.counted.row() | {"counts": applied.balance.counted.counts.tolist()}


def test_metrics_name_the_experts_of_all_stages(plait_ranks):
    expected = plait_ranks.run(counts, {}, [], world=1)[0]
    assert len(expected) == 7
    assert plait_ranks.run(counts, {}, [gpipe.GPipe()], world=2) == [expected] * 2


def written(trial, strategies, extra, folder):
    """One step; then a checkpoint and an export. Returns the parameters."""
    import torch.distributed as dist

    from plait.checkpoint.export import export
    from plait.checkpoint.save import Saver
    from plait.checkpoint.store import Store
    from plait.parallel.state import weights

    applied = trial.apply(strategies, extra)
    optimizer = trial.optimizer(applied.parameters())
    take_step(applied, optimizer, trial, 0)
    state = applied.checkpoint(optimizer)[0]
    known = list(applied.whole.shapes) if applied.whole else []
    saver = Saver(Store(folder / "checkpoints"), "async")
    saver.save(state, 1, known=known)
    saver.wait()
    export(weights(state), folder / "export", dist.get_rank() == 0, max_shard_bytes=20_000, known=known)
    return held(applied)


def goes_on(trial, strategies, extra, folder):
    """The parameters and the optimizer's state of the checkpoint; then the export read as initial weights."""
    from plait.checkpoint.init_from import read_weights
    from plait.checkpoint.load import load
    from plait.checkpoint.store import Store
    from plait.parallel.state import tied_names, weights

    applied = attrs.evolve(trial, seed=1).apply(strategies, extra)
    optimizer = trial.optimizer(applied.parameters())
    state, after = applied.checkpoint(optimizer)
    whole = applied.whole
    shapes = dict(whole.shapes) if whole else {fqn: tuple(t.shape) for fqn, t in weights(state).items()}
    path = Store(folder / "checkpoints").latest()
    Store.check_model(Store.read(path), shapes)
    load(path, state, after)
    found = of_all_stages(applied, {key: full(tensor) for key, tensor in applied.checkpoint(optimizer)[0].items()})
    fresh = attrs.evolve(trial, seed=2).apply(strategies, extra)
    ties = whole.ties if whole else tied_names(fresh.parts[0])
    read_weights(folder / "export", weights(fresh.checkpoint()[0]), ties, shapes)
    return found, held(fresh)


@pytest.mark.slow
def test_what_is_written_is_the_whole_model_and_every_layout_reads_it(plait_ranks, tmp_path):
    trial = Trial(LAYERS, dtype="float32")
    layouts = {"one": ({}, [], 1), "fsdp2": (FSDP2, [], 2), "pipeline": (FSDP2, [gpipe.GPipe()], 4)}
    kept = {}
    for name, (strategies, extra, world) in layouts.items():
        kept[name] = plait_ranks.run(written, trial, strategies, extra, tmp_path / name, world=world)[0]
    one, many = (sorted((tmp_path / name / "export").iterdir()) for name in ("one", "pipeline"))
    assert [file.name for file in one] == [file.name for file in many]
    assert one[0].name == "SHA256SUMS"
    assert one[-1].name == "model.safetensors.index.json"
    assert one[-1].read_bytes() == many[-1].read_bytes()
    for name, (strategies, extra, world) in layouts.items():
        states = {}
        for other in layouts if name == "pipeline" else ("pipeline",):  # the others: tests/checkpoint/test_layouts.py
            results = plait_ranks.run(goes_on, trial, strategies, extra, tmp_path / other, world=world)
            for state, initial in results:
                assert unequal({fqn: state[f"model.{fqn}"] for fqn in kept[other]}, kept[other]) is None
                assert unequal(initial, kept[other]) is None
            states[other] = results[0][0]
            assert len(states[other]) == 4 * len(kept[other]), name  # weight, two moments, step


class Drops(gpipe.GPipe):
    """Forgets a weight in its state."""

    @plait.hookimpl
    def checkpoint(self, model, optimizer):
        from plait.parallel.state import canonical_state

        state, after = canonical_state(model, optimizer)
        return {key: tensor for key, tensor in state.items() if key != "model.layers.3.ffn_norm.weight"}, after


def test_nothing_is_written_in_part(plait_ranks, tmp_path):
    with pytest.raises(RankError, match=r"no rank holds 'layers\.3\.ffn_norm\.weight'"):
        plait_ranks.run(written, Trial(LAYERS), {}, [Drops()], tmp_path, world=2)
    assert not list(tmp_path.rglob("manifest.json"))
    assert not (tmp_path / "export").exists()


class Skips(gpipe.GPipe):
    """Runs all micro-batches but the last."""

    @plait.hookimpl
    def forward_backward(self, parts, inputs, loss, mesh):
        return super().forward_backward(parts, list(inputs)[:-1], loss, mesh)


class Leaves(gpipe.GPipe):
    """Does not look at the last micro-batch."""

    @plait.hookimpl
    def forward_backward(self, parts, inputs, loss, mesh):
        return super().forward_backward(parts, itertools.islice(inputs, 3), loss, mesh)


class Swaps(gpipe.GPipe):
    """Gives each rank the other's stage."""

    @plait.hookimpl
    def parallelize(self, model, mesh, spec):
        at = 1 - mesh["pp"].get_local_rank()
        return [plait.stage(model, spec, 2 * at, 2 * at + 2)]


class Undriven(gpipe.GPipe):
    """Divides layers, and leaves the micro-batches to the core."""

    forward_backward: Any = None


class Wraps(gpipe.GPipe):
    """The same, and looks on."""

    @plait.hookimpl(wrapper=True)
    def forward_backward(self, parts, inputs, loss, mesh):
        return (yield)


class Unclaimed(gpipe.GPipe):
    claims: Any = ()


REFUSED = {
    "skips": (Skips, LAYERS, r"loss for the micro-batches \[0, 1, 2\] instead of \[0, 1, 2, 3\]"),
    "leaves": (Leaves, LAYERS, "left 1 of 4 micro-batches"),
    "swaps": (Swaps, LAYERS, "a first stage takes no stream|this stage needs the stream"),
    "undriven": (Undriven, LAYERS, "has the hook 'forward_backward'"),
    "wraps": (Wraps, LAYERS, "has the hook 'forward_backward'"),
    "unclaimed": (Unclaimed, LAYERS, "claims 'stages'"),
    "tied": (gpipe.GPipe, "tied", r"'tok_embeddings\.weight' and 'output\.weight' are one tied weight"),
    "unnamed": (gpipe.GPipe, functools.partial(like, Unnamed), r"'tok_embeddings\.weight' is in no block"),
    "twice": (gpipe.GPipe, functools.partial(like, Twice), "twice in one forward|before the blocks"),
    "backwards": (gpipe.GPipe, functools.partial(like, Backwards), "before the blocks that stand before it"),
    "original": (gpipe.GPipe, functools.partial(like, Original), "'layers.2' gets the stream and a second tensor"),
    "blocks": (functools.partial(gpipe.GPipe, 3), "llama3", "the model has 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_train_wrong_is_refused(plait_ranks, what):
    strategy, model, sentence = REFUSED[what]
    with pytest.raises(RankError, match=sentence):
        plait_ranks.run(train, Trial(model, micro=4), {}, [strategy()], world=2 if what != "blocks" else 3, timeout=60)


def test_two_strategies_that_cut_are_refused(plait_ranks):
    other = type("Other", (gpipe.GPipe,), {"name": "other"})
    with pytest.raises(RankError, match="both claim the role 'stages'"):
        plait_ranks.run(train, Trial(LAYERS), {}, [gpipe.GPipe(), other()], world=2)
