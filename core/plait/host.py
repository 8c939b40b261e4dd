"""From words to a training step: what programs that run Plait start from, as strategies start from `plait`.

config = host.compose(["model=llama3_debug", "train.steps=10"])
checked = host.check(config, world=2)
applied = checked.apply()  # on each of two ranks, or inside host.simulated(2, rank=0) without ranks
done = applied.step(batch, optimizer)
"""

from plait.check.check import check
from plait.check.checked import Checked
from plait.compose.compose import compose
from plait.parallel.apply import Applied
from plait.parallel.simulated import simulated
from plait.parallel.step import Stepped

__all__ = ["Applied", "Checked", "Stepped", "check", "compose", "simulated"]
