"""The training loop: steps, optimizer, and the metrics of a step.

May import `convert` and the rooms below it.
"""
