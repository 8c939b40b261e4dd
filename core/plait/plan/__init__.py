"""What a step of a run costs, from a step that is traced with the real strategies on a fake group, without weights.

`tracing` records a step of one rank, `stages` puts together those of ranks that divide the layers, `pricing` those of
many layouts.

May import `launch` and the rooms below it.
"""
