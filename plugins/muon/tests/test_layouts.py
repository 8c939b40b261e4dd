"""The whole table of layouts: in float64 the steps of one process, and each matrix computed by one rank of the world.

The bounds, stated before they were measured: 1e-10 of the way of each parameter after 5 steps, 1e-9 if the run was
resumed in another layout on its way.
"""

from unittest import mock

import attrs
import pytest

import plait_muon.muon
import plait_muon.soap
from plait import Batch, canonical
from plait.host import Saver, Store, load
from plait.testing import Trial, batch, full

STEPS, SAVED = 5, 2
FSDP2, DDP, ZERO = {"fsdp2": {}}, {"ddp": {}}, {"zero": {}}
TENSOR, EXPERT, STAGES = (
    {"tensor_parallel": {"degree": 2}},
    {"expert_parallel": {"degree": 2}},
    {"pipeline": {"degree": 2}},
)
SEQUENCE, LORA = {"context_parallel": {"degree": 2}}, {"lora": {"rank": 4}}
MUON = {"_target_": "plait_muon.muon.Muon", "lr": 0.01, "adamw_lr": 0.005, "bucket": 500}
LAYOUTS = {  # the number of ranks, the model, strategies
    "shards": (4, "moe", FSDP2),
    "copies of shards": (4, "moe", {"fsdp2": {"replicate": 2}}),
    "one graph of shards": (2, "moe", {"simplefsdp": {}}),
    "copies": (2, "moe", DDP),
    "shards of states": (2, "moe", ZERO),
    "shards of states alone": (2, "llama3", {"zero": {"stage": 1}}),
    "tensor ranks": (2, "llama3", TENSOR),
    "copies of tensor ranks": (4, "qk_norm", {**TENSOR, **DDP}),
    "shards of tensor ranks": (4, "llama3", {**TENSOR, **FSDP2}),
    "shards of states of tensor ranks": (4, "llama3", {**TENSOR, **ZERO}),
    "sequences and shards": (4, "llama3", {**SEQUENCE, **FSDP2}),
    "sequences and copies": (4, "llama3", {**SEQUENCE, **DDP}),
    "stages of shards": (4, "moe", {**STAGES, **FSDP2}),
    "stages of copies": (4, "llama3", {**STAGES, **DDP}),
    "stages of tensor ranks": (4, "llama3", {**STAGES, **TENSOR}),
    "experts": (4, "moe", {**EXPERT, **FSDP2}),
    "experts and tensor ranks": (4, "moe", {**EXPERT, **TENSOR, **FSDP2}),
    "stages of experts": (4, "moe", {**STAGES, **EXPERT, **FSDP2}),
    "adapters of shards": (2, "llama3", {**LORA, **FSDP2}),
    "adapters of copies": (2, "llama3", {**LORA, **DDP}),
}
OFTEN = ("stages of experts",)
SOAP = {"_target_": "plait_muon.soap.Soap", "lr": 0.01, "adamw_lr": 0.005, "bucket": 500, "every": 2}
VARIANTS = {
    "muon": MUON,
    "normuon by heads": {**MUON, "normuon": True, "split": "heads"},
    "soap": SOAP,
    "soap by parts": {**SOAP, "split": "parts"},
}


@attrs.frozen
class Trained:
    """initial, final: parameters by FQN. computed: matrices that this rank computed in all steps: orthogonalised, or
    stepped in their eigenbases."""

    initial: dict
    final: dict
    computed: int


def taken(applied):
    return {canonical(n): full(p).detach().clone() for part in applied.parts for n, p in part.named_parameters()}


def trained(trial, strategies, first=0, last=STEPS, folder=None, start=None):
    """Steps `first` to `last`. folder: where the run is saved at its end; start: a checkpoint from which it starts."""
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(trial.optimizer)
    if start is not None:
        load(start, *applied.checkpoint(optimizer))
    initial, computed = taken(applied), []
    newton_schulz, update = plait_muon.muon.newton_schulz, plait_muon.soap.update

    def orthogonalised(x_NRC, iterations):
        computed.append(len(x_NRC))
        return newton_schulz(x_NRC, iterations)

    def rotated(*matrix, **options):
        computed.append(1)
        update(*matrix, **options)

    with (
        mock.patch.object(plait_muon.muon, "newton_schulz", orthogonalised),
        mock.patch.object(plait_muon.soap, "update", rotated),
    ):
        for number in range(first, last):
            step(applied, optimizer, number)
    if folder is not None:
        saver = Saver(Store(folder), "sync")
        saver.save(applied.checkpoint(optimizer)[0], last)
        saver.wait()
        return Store(folder).latest()
    return Trained(initial, taken(applied), sum(computed))


def step(applied, optimizer, number):
    tokens, labels = batch(number)
    index, count = applied.mesh.rank_and_size("batch")
    own = Batch(tokens.chunk(count)[index], labels.chunk(count)[index])
    applied.step(own, optimizer, max_norm=1.0)


def trial_of(model, variant):
    return Trial(model, steps=STEPS, trains_with=VARIANTS[variant])


def one_process(ranks, model, variant, strategies):
    alone = LORA if "lora" in strategies else {}
    key = ("a matrix optimizer in one process", model, variant, str(alone))
    if key not in ranks.kept:
        (ranks.kept[key],) = ranks.run(trained, trial_of(model, variant), alone, world=1)
    return ranks.kept[key]


def compare(found, one, bound):
    ends = {}
    for each in found:
        ends |= each.final
        for name, value in each.final.items():
            off, way = float((value - one.final[name]).norm()), float((one.final[name] - one.initial[name]).norm())
            assert off <= bound * way, f"{name} is off by {off / max(way, 1e-300):.1e} of its way"
    assert ends.keys() == one.final.keys()


@pytest.mark.parametrize("variant", [pytest.param(v, marks=pytest.mark.slow if v != "muon" else ()) for v in VARIANTS])
@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in LAYOUTS])
def test_steps_equal_one_process_and_no_rank_computes_what_another_does(plait_ranks, layout, variant):
    world, model, strategies = LAYOUTS[layout]
    one = one_process(plait_ranks, model, variant, strategies)
    found = plait_ranks.run(trained, trial_of(model, variant), strategies, world=world)
    compare(found, one, 1e-10)
    counts = [each.computed for each in found]
    assert sum(counts) == one.computed, f"matrices computed by each rank: {counts}, in one process {one.computed}"
    assert all(counts), f"a rank had nothing to do: {counts}"


PAIRS = [
    ("stages of experts", "experts and tensor ranks"),
    ("experts and tensor ranks", "copies"),
    ("copies", "shards of states"),
    ("shards of states", "stages of shards"),
    ("one graph of shards", "stages of experts"),
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["normuon by heads", "soap"])
@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_a_run_goes_on_in_another_layout(plait_ranks, tmp_path, saved, resumed, variant):
    world, model, strategies = LAYOUTS[saved]
    start = plait_ranks.run(trained, trial_of(model, variant), strategies, 0, SAVED, tmp_path, world=world)[0]
    world, _, strategies = LAYOUTS[resumed]
    one = one_process(plait_ranks, model, variant, strategies)
    found = plait_ranks.run(trained, trial_of(model, variant), strategies, SAVED, STEPS, None, start, world=world)
    compare(found, one, 1e-9)
