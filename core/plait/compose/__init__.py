"""From words to objects: overrides to one config, and the model, data and optimizer that its nodes name.

May import `data` and the rooms below it.
"""
