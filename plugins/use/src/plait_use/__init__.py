"""Commands for what a run has trained: `plait sample`, `plait eval` and `plait push`."""
