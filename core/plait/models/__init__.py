"""The models that Plait ships. A model of one's own needs nothing from here: see docs/models.md."""
