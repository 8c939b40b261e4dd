"""What a step of a run costs, from a step that is traced with the real strategies on a fake group, without weights.

May import `launch` and the rooms below it.
"""
