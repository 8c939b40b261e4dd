"""The contract carries strategies that the core and fsdp2 have never heard of: tensor ranks, and experts on a view."""

import pytest
import torch

import plait
from plait.strategies.registry import create
from plait.testing import assert_same
from plait_testing.pool import RankError
from plait_testing.trial import Trial, train
from tests.helpers.toys import ToyExperts, ToyTensor, mixture

FSDP, HSDP = {"fsdp2": {}}, {"fsdp2": {"replicate": 2}}


@pytest.fixture(scope="module")
def references(plait_ranks):
    return {model: plait_ranks.run(train, Trial(model), world=1)[0] for model in ("llama3", mixture)}


@pytest.mark.parametrize(
    ("world", "strategies", "extra", "model"),
    [
        pytest.param(2, {}, [ToyTensor()], "llama3", marks=pytest.mark.slow),
        pytest.param(4, FSDP, [ToyTensor()], "llama3", marks=pytest.mark.slow),
        pytest.param(4, HSDP, [ToyTensor()], "llama3", marks=pytest.mark.slow),
        pytest.param(2, FSDP, [ToyExperts()], mixture, marks=pytest.mark.slow),
        pytest.param(4, FSDP, [ToyExperts()], mixture, marks=pytest.mark.slow),
        pytest.param(4, FSDP, [ToyExperts(4)], mixture, marks=pytest.mark.slow),
        (4, HSDP, [ToyExperts()], mixture),
    ],
)
def test_parity(plait_ranks, references, world, strategies, extra, model):
    reference = references[model]
    assert_same(plait_ranks.run(train, Trial(model), strategies, extra, world=world), reference)


def meshes():
    model = mixture()
    applied = plait.apply(model, model.spec(), [create("fsdp2", {"replicate": 2}), ToyExperts(2)])
    mesh, part = applied.mesh, applied.parts[0]
    expert, dense = part.layers[0].experts.weight, part.head.weight
    ranks = lambda m: m.mesh.flatten().tolist()  # noqa: E731
    return {
        "share": mesh.rank_and_size("batch"),
        "views": (mesh.view_of(expert), mesh.view_of(dense)),
        "splitters": (mesh.sharding_axis(("experts", "ffn")), mesh.sharding_axis(("vocab", "embed"))),
        "data": (ranks(mesh.data(expert)), ranks(mesh.data(dense))),
        "leader": mesh.is_dp_leader(),
        "local": tuple(expert.to_local().shape),
    }


def test_who_sums_what(plait_ranks):
    answers = plait_ranks.run(meshes, world=4)
    assert [a["share"] for a in answers] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert all(a["views"] == ("toy_experts", None) and a["leader"] for a in answers)
    assert all(a["splitters"] == ("toy_ep", None) for a in answers)
    # ranks 0 and 1 hold different experts: ranks 0 and 2 hold the same ones, and sum their gradients
    assert [a["data"] for a in answers] == [([0, 2], [0, 1, 2, 3]), ([1, 3], [0, 1, 2, 3])] * 2
    assert all(a["local"] == (2, 16, 16) for a in answers)


def test_a_run_that_nobody_sums_is_refused(plait_ranks):
    with pytest.raises(
        RankError, match=r"the axes spread=2 \(spread\) split the tokens, but no selected strategy sums"
    ):
        plait_ranks.run(nobody_sums, world=2)


def nobody_sums():
    import attrs

    from plait import MeshAxis, hookimpl

    @attrs.define
    class Spread:
        @hookimpl
        def build_mesh(self):
            return [MeshAxis("spread", 2, splits="batch")]

    model = mixture()
    plait.apply(model, model.spec(), [Spread()])


def test_rows_drawn():
    """A model on one rank draws every number once, whatever the order of its parameters."""
    from plait.parallel.initialize import initialise, materialise

    model = mixture()
    materialise(model, "cpu")
    assert initialise(model, model.spec(), 0) == sum(p.numel() for p in model.parameters())
    assert not torch.equal(model.embed.weight[0], model.embed.weight[1])
