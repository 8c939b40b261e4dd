"""What a run writes for people: its folder, metrics, console, profiles.

May import `parallel` and the rooms below it.
"""
