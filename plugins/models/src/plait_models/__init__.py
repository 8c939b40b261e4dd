"""Plait's own models. They use what any model can: see docs/models.md."""
