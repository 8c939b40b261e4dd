"""What a step of a run costs, from a step that is traced with the real strategies on a fake group, without weights.

`tracing` records a step of one rank, `stages` puts together those of ranks that divide the layers, `pricing` those of
many layouts. `planning` is what `plait.planning` offers to strategies.

It takes of Plait what `plait` and `plait.host` export, as a planner of yours can.
"""
