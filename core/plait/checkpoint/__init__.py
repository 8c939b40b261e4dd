"""Checkpoints: everything that a run needs to continue, in a form that is independent of strategies.

May import `records` and the rooms below it.
"""
