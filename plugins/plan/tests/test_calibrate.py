"""`plait calibrate`: what it measures, the file that it writes, and what it refuses."""

import itertools
import math
import time
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from omegaconf import OmegaConf

from plait import Cluster
from plait.host import compose
from plait_plan import calibrate
from plait_plan.calibrate import DTYPES, LEAST, MOST, OF_A_CPU, SENDS, Measured, Sizes, links
from plait_plan.commands.calibrate import measured, written
from plait_testing.pool import Pool


def _made(bandwidth: float, latency: float, ranks: int) -> list[tuple[str, int, float]]:
    """Times of a ring in which each rank sends so many bytes a second; a sum goes around twice."""
    hops, found = ranks.bit_length() - 1, []
    for size in (2**10, 2**16, 2**24):
        once = latency * hops + size * (ranks - 1) / ranks / bandwidth
        found += [("all_gather", size, once), ("all_reduce", size, 2 * once), ("all_to_all", size, once * 1.25)]
    return found


def test_links_are_found_again_in_times_that_were_made_of_them() -> None:
    bandwidth, latency, worst = links(_made(1e9, 1e-4, 8), 8)
    assert bandwidth == pytest.approx(1e9, rel=0.01)
    assert latency == pytest.approx(1e-4, rel=0.05)
    assert worst == pytest.approx(0.8, rel=0.02)


def test_the_file_is_a_cluster() -> None:
    found = Measured("GPU (of a sort)", 80e9, 1e9, (3e12, 2e12), {"float32": (4e13, 3e13)}, 5e-6, _made(1e11, 1e-5, 4))
    cluster = Cluster.of(OmegaConf.to_container(OmegaConf.create(written(found, "cuda", 4))))
    assert cluster.has("GPU (of a sort)")
    assert (cluster.memory, cluster.reserved, cluster.node, cluster.launch) == (80e9, 1e9, 4, 5e-6)
    assert cluster.achieved.products == [0.75, 1.0]
    assert cluster.achieved.memory == [0.667, 1.0]
    assert cluster.inside.bandwidth == pytest.approx(1e11, rel=0.01)


def test_the_file_of_a_cpu_has_the_kind_of_machine_that_is_shipped() -> None:
    """All ranks of the machine share one kind of link, no device is asked for its name, and sizes are not rounded."""
    found = Measured("CPU", 8e9, 1e9, (3e9, 2e9), {"float32": (4e9, 3e9)}, 5e-6, _made(1e9, 1e-5, 2))
    own = Cluster.of(OmegaConf.to_container(OmegaConf.create(written(found, "cpu", 2))))
    shipped = Cluster.of(compose(["cluster=cpu"]).cluster)
    assert (own.node, own.granularity, own.devices) == (shipped.node, shipped.granularity, shipped.devices)


def _calls(slow: float, on_last: float = 0.0) -> int:
    """How often a rank calls what takes the last one `on_last` seconds, if more than `slow` is long."""
    calls: list[float] = []
    takes = on_last * dist.get_rank()

    def work() -> None:
        calls.append(takes)
        time.sleep(takes)

    with mock.patch.object(calibrate, "SLOW", slow):
        calibrate._seconds("cpu", work)
    return len(calls)


def test_all_ranks_make_the_same_calls_and_one_of_what_takes_long(plait_ranks: Pool) -> None:
    assert plait_ranks.run(_calls, -1.0, world=2) == [1, 1]
    assert plait_ranks.run(_calls, 0.1, 0.2, world=2) == [1, 1]
    assert plait_ranks.run(_calls, math.inf, 0.05, world=2) == [LEAST + 1] * 2
    assert plait_ranks.run(_calls, math.inf, world=2) in ([n + 1] * 2 for n in range(LEAST, MOST + 1))


def test_a_call_that_waits_for_a_core_counts_as_often_as_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of ten is ten times as slow, as a median does not see."""
    times = itertools.cycle([0.01] * 9 + [0.1])
    monkeypatch.setattr(calibrate, "_slowest", lambda seconds: seconds)
    monkeypatch.setattr(calibrate, "_call", lambda device_type, work: next(times))
    assert calibrate._seconds("cpu", lambda: None) == pytest.approx(0.019)


@pytest.mark.parametrize("given", [None, Sizes(2**16, (32, 64), (2**10, 2**14))], ids=["none", "some"])
def test_the_sizes_of_the_device_are_measured_unless_others_are_given(
    given: Sizes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Measured("CPU", 8e9, 1e9, (3e9, 2e9), {"float32": (4e9, 3e9)}, 5e-6, _made(1e9, 1e-5, 2))

    def ranks(measure: object, arguments: tuple[object, ...], nprocs: int) -> None:
        assert arguments[:2] == (nprocs, "cpu")
        assert arguments[3] == (given or OF_A_CPU)
        torch.save(attrs.asdict(found), Path(str(arguments[2])) / "measured")

    monkeypatch.setattr(torch.multiprocessing, "spawn", ranks)
    assert measured("cpu", 2, given) == found


def test_a_rank_measures_itself_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "WINDOW", 0.0)
    threads = torch.get_num_threads()
    try:
        calibrate.measure(0, 1, "cpu", str(tmp_path), Sizes(2**12, (8, 16), (2**10,)))
    finally:
        torch.set_num_threads(threads)
    assert not dist.is_initialized()
    found = Measured(**torch.load(tmp_path / "measured", weights_only=True))
    assert found.name == "CPU"
    assert found.sends == []  # to nobody
    assert set(found.products) == set(DTYPES)
    assert all(high > low > 0 for high, low in (found.bandwidth, *found.products.values())), "of several sizes"
    assert found.memory > found.held > 0
    assert found.launch > 0


def _sent() -> list[float]:
    """Seconds of each kind of collective; ranks that share one element get one each."""
    with mock.patch.object(calibrate, "WINDOW", 0.0):
        return [calibrate._send("cpu", kind, size) for kind in SENDS for size in (4, 2**10)]


def test_ranks_send_in_every_way(plait_ranks: Pool) -> None:
    for seconds in plait_ranks.run(_sent, world=2):
        assert min(seconds) > 0


@pytest.mark.slow
def test_ranks_measure_themselves_and_the_file_serves_a_plan(plait_project, tmp_path: Path) -> None:
    found = measured("cpu", 2, Sizes(2**16, (32, 64), (2**10, 2**14)))
    assert set(found.products) == set(DTYPES)
    assert [(kind, size) for kind, size, _ in found.sends] == [(k, size) for k in SENDS for size in (2**10, 2**14)]
    path = tmp_path / "conf" / "cluster" / "here.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(written(found, "cpu", 2))
    done = plait_project(
        "plan", "strategy=[fsdp2]", "world=2", "cluster=here", "model.n_layers=2", "validation.interval=0"
    )
    assert done.code == 0, done.err
    assert "fits on CPU" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ranks=0"], "ranks is '0'"),
        (["device=tpu"], "device=tpu, but torch sees no GPU here; use device=cpu"),
        (["name=a/b"], "name is 'a/b'"),
        (["size=3"], "plait calibrate has no argument size=3; it takes name=NAME, "),
        (["name=taken"], "conf/cluster/taken.yaml exists already"),
    ],
)
def test_what_it_refuses(plait_project, arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "taken.yaml").touch()
    done = plait_project("calibrate", *arguments)
    assert done.code == 1
    assert said in done.err
