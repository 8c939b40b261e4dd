"""`plait plan` and `plait calibrate`: light modules, whose work is imported when they run."""
