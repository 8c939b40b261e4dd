"""`plait train -m`: many jobs from one command, their results, and how the same command continues.

May import `launch` and the rooms below it.
"""
