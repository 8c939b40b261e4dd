"""The clock against graphs whose times are worked out by hand; and the passes on graphs that are made here."""

import itertools

import attrs
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait import Cluster, PlaitError
from plait_simplefsdp.collectives import collectives, every
from plait_simplefsdp.estimate import Machine, seconds_of, seconds_to_send, times
from plait_simplefsdp.memory import hold_back, peak
from plait_simplefsdp.plan import plan
from plait_simplefsdp.reorder import one_ahead
from plait_simplefsdp.shard import BUCKET, NUMBER

# 1000 operations and 4 bytes a second, so that a product of 10 x 10 matrices takes 2 s by its operations and longer by
# its bytes unless memory is fast; 100 bytes a second between ranks; a collective takes 1 s more than its bytes.
SLOW = Machine("by hand", {torch.float32: 1e3}, 1e9, (100.0, 10.0), (1.0, 1.0))
ops, c10d = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


class Made:
    """A graph that is written node by node, in order."""

    def __init__(self, group):
        self.graph, self.group, self.mode = Graph(), group, FakeTensorMode()
        self.count = 0

    def given(self, *shape):
        node = self.graph.placeholder(f"given{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def __call__(self, target, *args, block=None):
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        if block is not None:
            node.meta["custom"] = {BUCKET: block, NUMBER: self.count}
            self.count += 1
        return node

    def gather(self, x, block="a"):
        return self(c10d.all_gather_into_tensor.default, x, 4, self.group, block=block)

    def scatter(self, x, block="a"):
        return self(c10d.reduce_scatter_tensor.default, x, "sum", 4, self.group, block=block)

    def wait(self, node):
        return self(c10d.wait_tensor.default, node)

    def product(self, x):
        """2 s: 2 x 10 x 10 x 10 operations."""
        return self(ops.mm.default, x, x)

    def end(self, *nodes):
        self.graph.output(nodes)
        return self.graph


def test_what_is_waited_for_at_once_is_exposed_in_full(group):
    made = Made(group)
    shard, x = made.given(25), made.given(10, 10)
    whole = made.wait(made.gather(shard))  # 100 elements: 1 + 400 x 3/4 / 100 = 4 s
    graph = made.end(made.product(x), whole)
    found = times(graph, SLOW)
    assert (found.compute, found.communication, found.exposed) == (2.0, 4.0, 4.0)
    assert found.bound == 2.0


def test_what_is_computed_meanwhile_hides_as_much(group):
    made = Made(group)
    shard, x = made.given(25), made.given(10, 10)
    under_way = made.gather(shard)  # until 4 s
    x = made.product(x)  # until 2 s
    graph = made.end(made.wait(under_way), x)  # 2 s more
    found = times(graph, SLOW)
    assert (found.compute, found.communication, found.exposed) == (2.0, 4.0, 2.0)


def test_collectives_of_one_group_go_one_after_another(group):
    made = Made(group)
    first, second, x = made.given(25), made.given(100), made.given(10, 10)
    a = made.gather(first)  # 0 to 4 s
    b = made.scatter(second)  # 4 to 8 s
    x = made.product(made.product(x))  # until 4 s
    a = made.wait(a)  # there already
    x = made.product(x)  # until 6 s
    graph = made.end(a, made.wait(b), x)  # 2 s more
    found = times(graph, SLOW)
    assert (found.compute, found.communication, found.exposed) == (6.0, 8.0, 2.0)
    assert found.bound == 2.0


def test_ranks_of_several_machines_are_slower_and_sums_to_all_go_twice(group):
    made = Made(group)
    gather, reduce = made.gather(made.given(25)), made(c10d.all_reduce.default, made.given(100), "sum", group)
    made.end(made.wait(gather), made.wait(reduce))
    gather, reduce = every(made.graph)
    assert seconds_to_send(gather, SLOW) == 4.0
    assert seconds_to_send(gather, attrs.evolve(SLOW, node=2)) == 31.0
    assert seconds_to_send(reduce, SLOW) == 8.0


def test_a_node_takes_what_its_operations_or_its_bytes_take(group):
    made = Made(group)
    x = made.given(10, 10)
    product, added, viewed = made.product(x), made(ops.add.Tensor, x, x), made(ops.view.default, x, [100])
    assert seconds_of(product, SLOW) == 2.0
    thin = attrs.evolve(SLOW, memory=100.0)
    assert seconds_of(product, thin) == 8.0  # 800 bytes in and out: x once, though it is both
    assert seconds_of(added, thin) == 4.0
    assert seconds_of(viewed, thin) == 0.0
    assert seconds_of(x, thin) == 0.0


def test_a_machine_is_what_the_table_of_clusters_says():
    found = Machine.of(Cluster.shipped()["h100"])
    assert found.flops[torch.bfloat16] == 989.4e12
    assert (found.memory, found.link, found.node) == (3.35e12, (450e9, 50e9), 8)
    assert found.latency[0] < found.latency[1]


def chain(group, blocks=4):
    """Blocks of two parameters each: gathered, waited for, used."""
    made = Made(group)
    shards = [made.given(25) for _ in range(2 * blocks)]
    x = made.given(10, 10)
    for i in range(blocks):
        for shard in shards[2 * i : 2 * i + 2]:
            whole = made(ops.view.default, made.wait(made.gather(shard, block=f"b{i}")), [10, 10])
            x = made(ops.mm.default, x, whole)
    return made.end(x)


def test_by_block(group):
    report = plan(chain(group), "forward", ["bucket_block"], SLOW)
    assert report["before"]["collectives"]["all_gather"] == {"count": 8, "bytes": 3200}
    assert report["after"]["collectives"]["all_gather"] == {"count": 4, "bytes": 3200}
    assert [b["blocks"] for b in report["buckets"]] == [["b0"], ["b1"], ["b2"], ["b3"]]
    assert report["before"]["exposed_ms"] == 32e3
    assert report["after"]["exposed_ms"] == 28e3  # each saves a latency


def test_one_bucket_ahead(group):
    graph = chain(group)
    report = plan(graph, "forward", ["bucket_block", "reorder"], SLOW)
    assert len(report["moved"]) == 3
    order = [c.start.name for c in collectives(graph)] + [c.wait.name for c in collectives(graph)]
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    starts, waits = order[:4], order[4:]
    for i in range(3):
        assert place[starts[i]] < place[starts[i + 1]] < place[waits[i]]
    # 7 s each for 4 buckets, of which the 4 s of products of the three blocks before are hidden
    assert report["after"]["exposed_ms"] == pytest.approx(28e3 - 3 * 4e3)


def test_a_reduction_is_waited_for_when_the_next_has_started(group):
    """Not before, so that it overlaps what follows; nor later, so that no more than two are held at once."""
    made = Made(group)
    x, waited = made.given(12, 12), []
    for i in range(4):
        x = made.product(x)
        waited.append(made.wait(made.scatter(x, block=f"b{i}")))
    graph = made.end(*waited)
    one_ahead(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    reductions = collectives(graph)
    assert len(reductions) == 4
    for one, following in itertools.pairwise(reductions):
        assert place[one.start] < place[following.start] < place[one.wait]
    for one, after in zip(reductions, reductions[2:], strict=False):
        assert place[one.wait] < place[after.start]


def test_by_time_joins_what_hides_and_no_more(group):
    fast = attrs.evolve(SLOW, link=(300.0, 10.0))  # a parameter is sent in 1 + 1 s; a product takes 2 s
    graph = chain(group)
    report = plan(graph, "forward", ["bucket_auto", "reorder"], fast)
    assert sum(b["parameters"] for b in report["buckets"]) + len(collectives(graph)) - len(report["buckets"]) == 8
    assert 1 < len(collectives(graph)) < 8
    assert report["after"]["exposed_ms"] < report["before"]["exposed_ms"]


def test_memory_holds_back_what_would_not_fit(group):
    graph = chain(group)
    plan(graph, "forward", ["bucket_block"], SLOW)
    without = peak(graph)[0]
    plan(graph, "forward", ["reorder"], SLOW)
    assert peak(graph)[0] > 1.05 * without
    held = hold_back(graph, without)
    assert held
    assert peak(graph)[0] <= 1.05 * without


def test_the_peak_by_hand(group):
    made = Made(group)
    x = made.given(10, 10)
    a = made.product(x)  # 400 bytes live
    b = made.product(a)  # 800, then a is gone
    c = made(ops.view.default, b, [100])  # b's
    graph = made.end(made(ops.add.Tensor, c, c))
    assert peak(graph)[0] == 800


def test_passes_that_find_nothing_to_act_on_are_an_error(group):
    graph = chain(group)
    for node in graph.nodes:
        node.meta.pop("custom", None)  # as if torch no longer carried it
    with pytest.raises(
        PlaitError,
        match=r"^strategy\.simplefsdp\.passes=\['reorder'\] found nothing to act on in the forward graph: none of",
    ):
        plan(graph, "forward", ["reorder"], SLOW, ["all_gather"])
    assert plan(graph, "forward", [], SLOW, ["all_gather"])["buckets"] == []
