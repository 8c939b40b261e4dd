"""Which strategies are installed, in which order they act, and their hooks joined. Imports `contract`; no torch."""
