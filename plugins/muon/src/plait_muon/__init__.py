"""Optimizers of whole matrices, in every layout: `optimizer=muon` and `optimizer=soap`."""
