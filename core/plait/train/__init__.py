"""The training loop: steps, optimizer, and the metrics of a step.

May import `checkpoint` and the rooms below it.
"""
