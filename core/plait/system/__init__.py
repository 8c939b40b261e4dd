"""The operating system: files that may be refused, locks, links, signals, sockets. Imports `contract`; no torch."""
