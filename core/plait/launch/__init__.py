"""Starts ranks, watches them, and tells how they ended.

May import `check` and the rooms below it.
"""
