"""GPT-2 for Plait: `model=gpt2` and `model=gpt2_debug`."""

from plait_gpt2.model import Gpt2

__all__ = ["Gpt2"]
