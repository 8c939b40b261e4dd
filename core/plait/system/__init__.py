"""The operating system: files that may be refused, locks, signals, sockets.

May import `contract`; only `torch_internals`, which is what torch keeps private, imports torch.
"""
