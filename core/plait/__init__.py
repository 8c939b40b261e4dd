"""Plait: parallel training strategies as plugins that combine into one training run. Importing it imports no torch."""

from plait.exporting import exporting

__version__ = "0.1.0"
__getattr__ = exporting(__name__, __file__)
