"""What the core, models and strategies agree on: hooks, axes, the model's spec, config types, errors.

Imports no other room and no torch.
"""
