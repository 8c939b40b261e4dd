"""A plan as text: nothing that a step costs is left out."""

import re
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from plait.host import compose, text
from plait_plan.engine import plan
from plait_plan.tables import page, stages, work
from plait_plan.values import Plan

TINY = [
    *("strategy=[fsdp2]", "cluster=h100", "model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1"),
    *("model.ffn_dim=64", "train.seq_len=32", "train.local_batch_size=2", "validation.interval=0"),
]


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(compose(TINY), 16)


def test_operators_beyond_the_largest_are_told_together(found: Any) -> None:
    most = 5
    shown = [line.split() for line in work(found, most)[1:]]
    assert len(shown) == most + 1
    assert shown[-1][:2] == [str(len(found.work) - most), "others"]
    rows = [*(line[1] for line in shown[:most]), shown[-1][2]]
    assert sum(int(count.replace(",", "")) for count in rows) == sum(one.count for one in found.work)
    assert len(work(found, len(found.work))) == 1 + len(found.work)


def test_copies_in_memory_are_of_all_ranks_of_a_machine_and_of_the_machine_before(found: Any) -> None:
    assert (found.copies, "copies in memory" in page(found)) == (None, False)
    with_copies = plan(compose([*TINY, "checkpoint.memory_steps=5"]), 16)
    own = found.memory.parameters + found.memory.optimizer
    assert with_copies.copies == 4 * 8 * own
    assert f"copies in memory take {text.size(32 * own)} of a machine's main memory" in page(with_copies)


def test_what_a_model_makes_of_its_devices_is_told_if_it_counts_its_operations(found: Any) -> None:
    known = attrs.evolve(found, time=attrs.evolve(found.time, mfu=(0.25, 0.5)))
    unknown = attrs.evolve(found, time=attrs.evolve(found.time, mfu=None))
    assert re.search(r"^MFU +25\.0 to 50\.0%$", page(known), re.MULTILINE)
    assert "MFU" not in page(unknown)


STAGES = """\
stages   1f1b over pp, 8 micro-batches

rank  stages  blocks  parameters  micro-batches kept      peak         sends                busy
   0  0 2     0 3       1.00 GiB                   4  3.00 GiB  16, 2.00 MiB  0.1000 to 0.2000 s
   1  1       1 2       1.00 GiB                   2  2.00 GiB  16, 2.00 MiB

bubble: ranks wait for 10.0 to 25.0% of the micro-batches' time

what follows is of rank 0
"""


def test_stages_stand_side_by_side(found: Any) -> None:
    assert stages(found) == []
    same = {"parameters": 2**30, "sends": 16, "sent": 2**21}
    first = SimpleNamespace(rank=0, stages=[0, 2], blocks=[0, 3], live=4, peak=3 * 2**30, busy=(0.1, 0.2), **same)
    last = SimpleNamespace(rank=1, stages=[1], blocks=[1, 2], live=2, peak=2 * 2**30, busy=None, **same)
    one = SimpleNamespace(schedule="1f1b", axis="pp", micro=8, ranks=[first, last], bubble=(0.25, 0.1))
    plan: Any = SimpleNamespace(stages=one, rank=0)
    assert "\n".join(line.rstrip() for line in stages(plan)) == STAGES
    one.bubble = None
    assert not any("bubble" in line for line in stages(plan))
