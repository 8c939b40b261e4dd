"""Seconds and bytes of many layouts, put together from a few traces.

Rests on `tracing`, and on `stages` for layouts that divide the layers.
"""
