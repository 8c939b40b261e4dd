"""The operating system: files that may be refused, locks, signals, sockets.

May import `contract`; no torch, except in the package of what torch keeps private.
"""
