"""From words to objects: overrides to one config, and the model, data and optimizer that its nodes name.

May import `models`, `data` and the rooms below them.
"""
