"""The operating system: files that may be refused, locks, links, signals, sockets.

May import `contract`; no torch.
"""
