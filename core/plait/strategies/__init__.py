"""The installed strategies, the order in which they act, and their hooks combined.

May import `ops`, `system` and the rooms below them; no torch.
"""
