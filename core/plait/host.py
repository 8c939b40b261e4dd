"""From words to a training step, and what a run leaves: what programs that run Plait, commands and sinks start from.

config = host.compose(["model=llama3_debug", "train.steps=10"])
checked = host.check(config, world=2)
applied = checked.apply()  # on each of two ranks, or inside host.simulated(2, rank=0) without ranks
done = applied.step(batch, optimizer)

rows = host.metrics.read(host.RunFolder("runs/a").metrics)
"""

from plait.exporting import exporting

__getattr__ = exporting(__name__, __file__)
