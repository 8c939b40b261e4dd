"""Folders of runs and sweeps, as a run leaves them."""

from plait.host import Job, Ledger, Outcome, RunFolder, metrics

LONG = "ValueError: made to fail; " + "a_reason_without_any_space_in_it_" * 12
MESH = {
    "world_size": 8,
    "dense": [
        {"name": "dp", "degree": 4, "splits": "batch", "shards": ["embed"], "strategy": "fsdp2"},
        {"name": "tp", "degree": 2, "splits": None, "shards": ["heads", "ffn"], "strategy": "tensor_parallel"},
    ],
    "views": {},
}


def make_run(path, lr=1e-3, steps=30, outcome="finished", mesh=MESH, name=None, experts=False, seed=0, more=()):
    """more: (column, its value) in every row."""
    folder = RunFolder(path)
    folder.ranks.mkdir(parents=True)
    config = {
        "run": {"name": name},
        "optimizer": {"lr": lr},
        "strategy": {"fsdp2": {"shard": -1}},
        "train": {"steps": steps, "seed": seed},
    }
    folder.write_config(config)
    folder.write_versions({"python": "3.11.7", "plait": "0.1.0", "torch": "2.13.0"})
    folder.write_mesh(mesh)
    folder.log_of(0).write_text("process 1 on node-a\nwaits on node-aa\nprocess 2 on node-b\n")
    file = metrics.MetricsFile(path / "metrics.jsonl")
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 5.0 - lr * 100 * step / steps, "grad_norm": 1.0, "tokens": 100 * step}
        row |= {"tokens_per_second": 50.0, "peak_memory_bytes": 2 << 30}
        row |= {"val_loss": 5.0} if step == steps else {}
        row |= {"experts/layers.0/max_over_mean": 2.0, "experts/layers.1/max_over_mean": None} if experts else {}
        file.log(row | dict(more))
    if outcome:
        folder.set_outcome(Outcome(outcome, f"it {outcome}", step=steps))


def make_sweep(path):
    make_run(path / "0", 1e-3)
    make_run(path / "1", 2e-3, steps=7, outcome="failed")
    jobs = [
        Job(0, "0", "finished", overrides=["optimizer.lr=1e-3"], planned_memory_bytes=3 << 29),
        Job(1, "1", "failed", overrides=["optimizer.lr=2e-3"], reason=LONG),
        Job(2, "2", "pruned", overrides=["optimizer.lr=3e-3"], reason="does not fit </script><b>"),
    ]
    with Ledger(path).changing(["-m"]) as written:
        written[:] = jobs
