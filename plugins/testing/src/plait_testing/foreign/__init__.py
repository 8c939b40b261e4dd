"""Compares any parallel PyTorch code with one process: what is asked, how it is run, and what its answers mean."""
