"""The lines of a run's start that say what trains."""

import pytest

from plait.check.introduced import introduced
from plait.host import check, compose

SMALL = ["model.n_layers=1", "train.seq_len=32", "train.local_batch_size=2", "launch.device=cpu"]


@pytest.mark.parametrize(
    ("arguments", "world", "lines"),
    [
        (
            ["strategy=[]"],
            1,
            [
                "model: Llama3, 828,160 parameters, in float32, on 1 x CPU",
                "data: Stdlib, 64 tokens per step: 2 samples of 32",
            ],
        ),
        (
            [
                "strategy=[fsdp2]",
                "precision.param=bfloat16",
                "train.global_batch_size=8",
                "data=text",
                f"data.path={__file__}",
            ],
            2,
            [
                "model: Llama3, 828,160 parameters, in bfloat16 with weights in float32, on 2 x CPU",
                f"data: Text of {__file__}, 256 tokens per step: 8 samples of 32",
            ],
        ),
        (
            ["strategy=[lora]", "strategy.lora.rank=1", "strategy.lora.random_base=true"],
            1,
            [
                "model: Llama3, 831,872 parameters, 3,712 of them added by strategies, in float32, on 1 x CPU",
                "data: Stdlib, 64 tokens per step: 2 samples of 32",
            ],
        ),
    ],
)
def test_model_numbers_devices_and_data(arguments: list[str], world: int, lines: list[str]) -> None:
    assert introduced(check(compose([*SMALL, *arguments]), world)) == lines
