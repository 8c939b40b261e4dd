"""Plait: parallel training strategies as plugins, braided into one training run. Importing it imports no torch."""
