"""What is plait-auto-dp's alone: what it picks, by the world and the model's size."""

import pytest
from plait_auto_dp import AutoDp
from plait_ddp import Ddp

from plait import Config, ModelSpec, Precision, Run
from plait_fsdp2 import Fsdp2

STRATEGIES = {"ddp": Ddp, "fsdp2": Fsdp2}


def picked(parameters, world, storage="float32", **options):
    """The strategies of a run of a model with this many parameters."""
    config = Config(precision=Precision(storage=storage))
    spec = ModelSpec(axes={})
    run = Run(config, world, "cpu", spec, parameters, create=lambda name, given: STRATEGIES[name](**given))
    AutoDp(**options).configure(run)
    return run.strategies


@pytest.mark.parametrize(
    ("parameters", "world", "storage", "name"),
    [
        (2.5e9, 8, "float32", "ddp"),  # 4 x 10 GB is just the budget
        (2.6e9, 8, "float32", "fsdp2"),
        (4.9e9, 8, "bfloat16", "ddp"),
        (70e9, 512, "float32", "fsdp2"),
    ],
)
def test_replicas_where_all_fits(parameters, world, storage, name):
    assert list(picked(int(parameters), world, storage)) == [name]


def test_parameters_that_fit_whole_are_gathered_once():
    """8e9 parameters: 32 GB whole, and 96 GB of gradients and moments that 8 ranks do not bring below 8, 16 do."""
    assert picked(8_000_000_000, 8)["fsdp2"].reshard_after_forward == "default"
    assert picked(8_000_000_000, 16)["fsdp2"].reshard_after_forward == "never"
    assert picked(8_000_000_000, 8, budget_gb=44)["fsdp2"].reshard_after_forward == "never"


def test_one_rank_needs_nothing():
    assert picked(70_000_000_000, 1) == {}
