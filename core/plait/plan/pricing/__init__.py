"""Seconds and bytes of many layouts, put together from a few traces.

May import `tracing` and `stages`.
"""
