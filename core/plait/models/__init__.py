"""The models that Plait ships. Your own model needs nothing from here: see docs/models.md.

May import `strategies` and the rooms below it.
"""
