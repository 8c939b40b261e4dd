"""`plait report`: one page about runs and sweeps, which opens without a server or a network.

May import `sweep` and the rooms below it.
"""
