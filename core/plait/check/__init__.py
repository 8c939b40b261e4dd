"""Everything that can be known before a rank starts: whether the run fits, and what it resumes.

May import `train` and the rooms below it.
"""
