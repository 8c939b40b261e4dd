"""What models and strategies share, and what your own model may need: attention, products of experts, loss sums.

May import `contract`. What it exports is listed in `__init__.pyi`.
"""

from plait.exporting import exporting

__getattr__ = exporting(__name__, __file__)
