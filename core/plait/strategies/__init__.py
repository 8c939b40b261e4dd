"""The installed strategies, the order in which they act, and their hooks combined.

May import `system` and the rooms below it; no torch.
"""
