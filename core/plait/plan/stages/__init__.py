"""The steps of ranks that divide a model's layers.

May import `tracing` and the files of `plan` that tracing rests on.
"""
