"""What a run would do, worked out without starting it."""
