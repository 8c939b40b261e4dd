"""Clipping, and AdamW's fused and foreach kernels, over the two meshes at once: the parameters of one process."""

import pytest
from test_town import LAYOUTS

from plait.host import make_optimizer
from plait_testing.models import moe
from plait_testing.trial import Trial, take_step, whole


def trained(strategies, kernels):
    trial = Trial(moe, max_norm=0.1)
    applied = trial.apply(strategies)
    node = {"_target_": "torch.optim.AdamW", "lr": 1e-2, "fused": False, **kernels}
    optimizer = make_optimizer(node, applied.parameters())
    norms = []
    for step in range(3):
        norms.append(take_step(applied, optimizer, trial, step)[1])
    return norms, whole(applied.parts[0])


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
@pytest.mark.parametrize("layout", ["fsdp2 x ep 2", "hsdp 2x2 x ep 2", "fsdp2 x tp 2 x ep 4"])
def test_same_parameters(plait_ranks, layout, kernels):
    world, strategies = LAYOUTS[layout]
    ((norms, one),) = plait_ranks.run(trained, {}, kernels, world=1)
    assert min(norms) > 0.1  # so that all steps were clipped
    for found, params in plait_ranks.run(trained, strategies, kernels, world=world):
        assert found == pytest.approx(norms, rel=1e-9)
        for name, param in one.items():
            assert float((params[name] - param).abs().max()) <= 1e-9, name
