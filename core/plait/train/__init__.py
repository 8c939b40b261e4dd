"""The training loop: steps, loss, optimizer, and the metrics of a step.

May import `convert` and the rooms below it.
"""
