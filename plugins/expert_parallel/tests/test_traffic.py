"""What crosses ranks is what the routing demands: rows that leave their rank, there and back, and counts beside."""

import pytest
import torch
from test_town import LAYOUTS

from plait_testing.models import moe
from plait_testing.trial import Trial, batch, forward_backward

WIDTH, EXPERTS, ROW = 32, 8, 32 * 8  # of the model `moe`; bytes of a row of float64


def choices():
    """Of every layer the experts of every token of batch 1, in one process: (samples, tokens, experts a token)."""
    applied = Trial(moe).apply({})
    found = []
    for router in (m for m in applied.parts[0].modules() if hasattr(m, "bias_update")):
        router.register_forward_hook(lambda module, args, result: found.append(result[1].unflatten(0, (8, 16))))
    applied.parts[0](batch(1)[0])
    return found


def sent(strategies, remat):
    """Bytes that leave this rank over `ep` in a step: of rows, of counts; how many exchanges of each there were."""
    from torch.utils._python_dispatch import TorchDispatchMode

    trial = Trial(moe, remat=remat)
    applied = trial.apply(strategies)
    group, own = applied.mesh["ep"].get_group().group_name, applied.mesh["ep"].get_local_rank()
    seen = {"rows": [], "counts": []}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops._c10d_functional.all_to_all_single.default:
                x, _, out, name = args
                assert name == group
                stays = x.shape[0] // len(out) if out is None else out[own]
                kind = "rows" if x.is_floating_point() else "counts"
                seen[kind].append((x.shape[0] - stays) * x[:1].numel() * x.element_size() if len(x) else 0)
            return func(*args, **(kwargs or {}))

    with Watch():
        forward_backward(applied, trial, 1)
    return {kind: (sum(each), len(each)) for kind, each in seen.items()}


def demanded(chosen, world, tp, ep):
    """Rows that leave each rank on their way to an expert, and that come to it from others, of one layer."""
    leave, come = [0] * world, [0] * world
    groups = world // tp
    for rank in range(world):
        samples = chosen.chunk(groups)[rank // tp]
        rows = sorted(samples.flatten().tolist())
        share = rows[len(rows) * (rank % tp) // tp : len(rows) * (rank % tp + 1) // tp]
        for expert in share:
            there = rank - rank % ep + expert // (EXPERTS // ep)
            if there != rank:
                leave[rank] += 1
                come[there] += 1
    return leave, come


@pytest.mark.parametrize(
    ("layout", "tp", "ep"),
    [
        ("fsdp2 x ep 2", 1, 2),
        pytest.param("fsdp2 x ep 4", 1, 4, marks=pytest.mark.slow),
        pytest.param("fsdp2 x tp 2 x ep 2", 2, 2, marks=pytest.mark.slow),
        ("fsdp2 x tp 2 (no sp) x ep 4", 2, 4),
    ],
)
@pytest.mark.parametrize("remat", ["none", pytest.param("selective", marks=pytest.mark.slow)])
def test_what_leaves_a_rank(plait_ranks, layout, tp, ep, remat):
    (layers,) = plait_ranks.once(choices, world=1)
    world, strategies = LAYOUTS[layout]
    found = plait_ranks.run(sent, strategies, remat, world=world)
    moved = [demanded(chosen, world, tp, ep) for chosen in layers]
    assert sum(sum(leave) for leave, _ in moved) > 0
    for rank in range(world):
        # Rows go and results come back; backward their gradients the other way.
        rows = sum(2 * (leave[rank] + come[rank]) for leave, come in moved)
        assert found[rank]["rows"] == (rows * ROW, 4 * len(layers)), f"rank {rank}"
        assert found[rank]["counts"] == (len(layers) * (EXPERTS - EXPERTS // ep) * 8, len(layers)), f"rank {rank}"


def events(layout):
    """What happens in one mixture, in order; of the shared expert, whether the results are still under way."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    trial, (_, strategies) = Trial(moe), LAYOUTS[layout]
    model = trial.apply(strategies).parts[0]
    mixture, found, results = model.layers["1"].feed_forward, [], []
    mixture.experts.register_forward_hook(lambda module, args, y: results.append(y))

    def shared_begins(module, args):
        found.append(("shared", isinstance(results[-1], AsyncCollectiveTensor) and not results[-1].completed))

    mixture.experts.register_forward_pre_hook(lambda module, args: found.append("experts"))
    mixture.shared.register_forward_pre_hook(shared_begins)
    model(trial.batch(0)[0][:2])
    return found


def test_the_shared_expert_computes_while_results_travel(plait_ranks):
    for found in plait_ranks.run(events, "fsdp2 x ep 2", world=LAYOUTS["fsdp2 x ep 2"][0]):
        assert found == ["experts", ("shared", True)]
