"""What torch's flight recorders say of this rank."""

import json

import torch

from plait.records.flight_recorder import last_collectives, progress_of_groups


def record(number, group="0", **more):
    return {"process_group": [group, "default_pg"], "collective_seq_id": number, "state": "completed", **more}


def test_nccl_and_gloo_count_apart(monkeypatch):
    """A rank lags in nccl behind others, and gloo, whose group has the same name, has counted further."""
    recorders = {
        "_dump_fr_trace_json": [record(40), record(3, "1")],
        "_dump_nccl_trace_json": [record(6), record(7, state="started"), record(9, is_p2p=True)],
    }
    for name, entries in recorders.items():
        dumped = json.dumps({"entries": entries}).encode()
        monkeypatch.setattr(torch._C._distributed_c10d, name, lambda dumped=dumped: dumped, raising=False)
    assert progress_of_groups() == {"gloo 0": (40, False), "gloo 1": (3, False), "nccl 0": (7, True)}
    assert len(list(last_collectives())) == 6
