"""From a command's overrides to running ranks: composing, checking, resuming, starting, watching.

May import `train` and the rooms below it.
"""
