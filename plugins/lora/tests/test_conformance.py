"""lora keeps the contract."""

from plait.strategies.registry import installed
from plait.testing import Layout, StrategySuite

READY = {name for name, plugin in installed().items() if plugin.state == "ok"}
FSDP2 = {"fsdp2": {}}
LAYOUTS = {
    "fsdp2 2": Layout(2, {"rank": 2}, FSDP2),  # more of them in test_numerics.py, where B is not 0
}


class TestLora(StrategySuite):
    strategy = "lora"
    layouts = {name: layout for name, layout in LAYOUTS.items() if set(layout.beside) <= READY}
