"""Losses that learn from preferences: `loss=dpo`, `ipo`, `orpo` and `kto`."""

from plait_preferences.kto import Kto
from plait_preferences.pairs import Dpo, Ipo, Orpo

__all__ = ["Dpo", "Ipo", "Kto", "Orpo"]
