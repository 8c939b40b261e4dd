"""Turns a model on meta into one that runs in parallel.

May import `models`, `data` and the rooms below them.
"""
