"""Dims that hold several parts in turn, such as a fused gate: each part is divided, under every strategy."""

import functools

import pytest
import torch
from fused import Fused, fused
from torch.distributed.tensor import DTensor

from plait import Packed, PlaitError
from plait.host import Saver, Store, load
from plait.parallel.check_spec import check_spec
from plait.parallel.state import canonical_state
from plait.testing import assert_same
from plait_testing.parity import unequal, worst_gradient
from plait_testing.pool import RankError
from plait_testing.trial import Trial, forward_backward, full, train

TP, FSDP, SIMPLE = {"tensor_parallel": {"degree": 2}}, {"fsdp2": {}}, {"simplefsdp": {}}
TRIAL = Trial(fused)
SLOW = pytest.mark.slow
LAYOUTS = {
    "tp": (TP, 2),
    "tp4": ({"tensor_parallel": {"degree": 4}}, 4),
    "tp+fsdp2": ({**TP, **FSDP}, 4),
    "tp+simplefsdp": ({**TP, **SIMPLE}, 4),
    "hsdp": ({**TP, "fsdp2": {"shard": 1, "replicate": 2}}, 4),
    "ep+fsdp2": ({"expert_parallel": {"degree": 2}, **FSDP}, 2),
    "fsdp2": (FSDP, 2),
}


def needs(strategies):
    for name in strategies:
        pytest.importorskip(f"plait_{name}")


@pytest.mark.parametrize("layout", [n if n == "tp" else pytest.param(n, marks=SLOW) for n in LAYOUTS])
def test_as_one_process(plait_ranks, layout):
    strategies, world = LAYOUTS[layout]
    needs(strategies)
    (one,) = plait_ranks.once(train, TRIAL, world=1)
    for result in plait_ranks.run(train, TRIAL, strategies, world=world):
        assert unequal(result.initial, one.initial) is None
        error, name = worst_gradient(result, one)
        assert error <= 1e-10, f"{name} is off by {error:.2e}"
        assert result.losses == pytest.approx(one.losses, rel=1e-9)
        assert result.norms == pytest.approx(one.norms, rel=1e-9)
        assert all(torch.allclose(v, one.final[n], rtol=1e-8, atol=1e-10) for n, v in result.final.items())


def test_cut_as_one_part_it_is_wrong(plait_ranks):
    """What the test above would see: the first rank has the gate alone."""
    (one,) = plait_ranks.once(train, TRIAL, world=1)
    for result in plait_ranks.run(train, Trial(functools.partial(Fused, "ffn")), TP, world=2):
        assert worst_gradient(result, one)[0] > 0.01


def shares(strategies):
    """FQN -> the share of it that this rank stores."""
    (model,) = TRIAL.apply(strategies).parts
    return {n: p.to_local().numel() / p.numel() for n, p in model.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.parametrize(
    "layout", ["tp", pytest.param("tp+fsdp2", marks=SLOW), pytest.param("tp+simplefsdp", marks=SLOW)]
)
def test_a_rank_stores_its_share(plait_ranks, layout):
    strategies, world = LAYOUTS[layout]
    needs(strategies)
    for found in plait_ranks.run(shares, strategies, world=world):
        names = [n for n in found if n.endswith(("gate_up", "gate_up.weight", "down", "down.weight"))]
        assert len(names) == 8
        assert {found[n] for n in names} == {1 / world}


def made(strategies):
    applied = TRIAL.apply(strategies)
    optimizer = TRIAL.optimizer(applied.parameters())
    return applied, optimizer


def everything(applied, optimizer):
    return {key: full(tensor) for key, tensor in canonical_state(applied.parts[0], optimizer)[0].items()}


def save_after_a_step(strategies, folder):
    applied, optimizer = made(strategies)
    forward_backward(applied, TRIAL, 0)
    optimizer.step()
    saver = Saver(Store(folder), "async")
    saver.save(canonical_state(applied.parts[0], optimizer)[0], 1)
    saver.wait()
    return everything(applied, optimizer)


def load_other(strategies, folder):
    applied, optimizer = made(strategies)
    load(Store(folder).path_of(1), *canonical_state(applied.parts[0], optimizer))
    return everything(applied, optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("tp+fsdp2", "tp"), *(pytest.param(*pair, marks=SLOW) for pair in (("tp", "tp+simplefsdp"), ("fsdp2", "tp4")))],
)
def test_a_checkpoint_is_whole(plait_ranks, tmp_path, saved, loaded):
    """Weights and moments go from one layout to another bit by bit, and to one process."""
    for name in (saved, loaded):
        needs(LAYOUTS[name][0])
    (strategies, world), (others, ranks) = LAYOUTS[saved], LAYOUTS[loaded]
    wanted = plait_ranks.run(save_after_a_step, strategies, tmp_path, world=world)[0]
    for found in (
        *plait_ranks.run(load_other, others, tmp_path, world=ranks),
        *plait_ranks.run(load_other, {}, tmp_path, world=1),
    ):
        assert unequal(found, wanted) is None


def divided_again():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from plait import held_indices, shard_of_parts

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = [Shard(0), shard_of_parts(0, 2)]
    twice = DTensor.from_local(torch.empty(2, 3), mesh, placements, run_check=False, shape=(8, 3), stride=(3, 1))
    return held_indices(twice, 0)


def test_a_dim_of_parts_is_divided_once(plait_ranks):
    with pytest.raises(RankError, match=r"dim 0 of a parameter of shape \(8, 3\) holds 2 parts.*plait.shard_dim"):
        plait_ranks.run(divided_again, world=4)


def test_of_a_bias_of_parts_each_rank_uses_its_share(plait_ranks):
    """It is stored whole, so that data-parallel ranks find a dim to divide."""
    trial, (strategies, world) = Trial(functools.partial(Fused, Packed("ffn", 2), bias=True)), LAYOUTS["tp+fsdp2"]
    (one,) = plait_ranks.run(train, trial, {}, world=1)
    assert_same(plait_ranks.run(train, trial, strategies, world=world), one)


@pytest.mark.parametrize(("axis", "parts"), [("ffn", 1), ("ffn", 2.0), (None, 2)])
def test_parts_are_two_or_more_of_an_axis(axis, parts):
    with pytest.raises((ValueError, TypeError)):
        Packed(axis, parts)


def test_a_dim_that_is_no_multiple_is_refused():
    model = Fused(Packed("ffn", 5))
    with pytest.raises(PlaitError, match="the axis 5 x ffn, but 48 is no multiple of 5"):
        check_spec(model, model.spec())


@SLOW
@pytest.mark.parametrize("beside", [{}, SIMPLE], ids=str)
def test_compiled(plait_ranks, beside):
    needs(beside)
    (one,) = plait_ranks.once(train, TRIAL, world=1)
    world = 4 if beside else 2
    assert_same(
        plait_ranks.run(train, Trial(fused, compile="aot_eager"), {**TP, **beside}, world=world, timeout=240), one
    )


@pytest.mark.parametrize(("beside", "world"), [({}, 2), pytest.param(FSDP, 4, marks=SLOW)], ids=str)
def test_adapters_of_parts(plait_ranks, beside, world):
    """Of a fused matrix, the rows of an adapter are divided as its own."""
    needs({"lora": {}, **beside})
    lora = {"lora": {"rank": 4, "targets": ["ffn"]}}
    (one,) = plait_ranks.run(train, TRIAL, lora, world=1)
    assert any("gate_up" in name for name in one.gradients)
    assert_same(plait_ranks.run(train, TRIAL, {**lora, **TP, **beside}, world=world), one)
