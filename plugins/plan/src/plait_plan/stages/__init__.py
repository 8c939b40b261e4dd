"""The steps of ranks that divide a model's layers.

Rests on `tracing`.
"""
