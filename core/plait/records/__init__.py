"""What a run writes for people: its folder, metrics, console, profiles."""
