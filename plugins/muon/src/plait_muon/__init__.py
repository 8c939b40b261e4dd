"""Muon for matrices of blocks, AdamW for all other parameters, in every layout: `optimizer=muon`."""
