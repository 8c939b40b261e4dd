"""What one rank does in a step, without computing it: its operators, collectives and memory.

Rests on `values`, `cannot` and `torch_internals`.
"""
