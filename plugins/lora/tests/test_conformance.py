"""lora keeps the contract."""

from plait.strategies.registry import installed
from plait.testing import Layout, StrategySuite

READY = {name for name, plugin in installed().items() if plugin.state == "ok"}
FSDP2 = {"fsdp2": {}}
LAYOUTS = {
    "fsdp2 2": Layout(2, {"rank": 2, "random_base": True}, FSDP2)  # more of them in test_numerics.py, where B is not 0
}


# Its own tests train and save with more than the zeros that the suite starts from.
LIKE_OTHERS = """
test_m test_accumulation test_recomputation test_float32 test_the_loss test_tied test_a_run test_nothing test_checkpoint
test_clipping test_every_token test_no_rank test_keeps_to
"""


class TestLora(StrategySuite):
    strategy = "lora"
    slow = (*StrategySuite.slow, *LIKE_OTHERS.split())
    layouts = {name: layout for name, layout in LAYOUTS.items() if set(layout.beside) <= READY}
