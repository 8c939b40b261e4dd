"""`plait train -m`: many jobs from one command, what came of each, and how the same command goes on."""
