"""Turns a model on meta into one that runs in parallel.

May import `compose` and the rooms below it.
"""
