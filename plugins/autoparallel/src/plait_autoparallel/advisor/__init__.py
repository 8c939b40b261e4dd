"""The advisor: a lower bound for the time of a plan's blocks, from a program over every operator."""
