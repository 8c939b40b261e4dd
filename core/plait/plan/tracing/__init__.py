"""What one rank does in a step, without computing it: its operators, collectives and memory.

Imports nothing of `plan` but `values` and `cannot`.
"""
