"""Compiles the model's graph with inductor, and takes graphs that an earlier start compiled from torch's caches.

Needs `compile_fx`, `list_mode_options` and `custom_graph_pass` of `torch._inductor`, and `_get_root_mesh` and `_hash`
of meshes, in torch 2.11 to 2.15. Test: plugins/simplefsdp/tests/test_cached.py.
"""

from collections.abc import Callable
from typing import Any

from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule

from plait_simplefsdp.cached import KeptReport

Partition = Callable[..., tuple[GraphModule, GraphModule]]
Planner = Callable[[Graph, str], dict[str, Any]]  # of a "forward", "backward" or "inference" graph, in place


class _Keyed:
    """torch's caches hash an object of theirs by its `uuid`, and one in inductor's options by what it pickles to."""

    key: str | None  # None: no cache

    def uuid(self) -> str | None:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.key,)


class Partitioner(_Keyed, CustomPartitionerFn):
    """Partitions one joint graph."""

    def __init__(self, key: str | None, partition: Partition) -> None:
        self.key, self.partition = key, partition
        self.forward_next = False

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        self.forward_next = True
        return self.partition(gm, joint_inputs, **kwargs)


class Planned(_Keyed, CustomGraphPass):
    """Runs the passes on each graph that is compiled; those from a cache were changed by them before."""

    def __init__(
        self, key: str | None, divided: Partitioner, planner: Planner, told: Callable[[dict[str, Any]], None]
    ) -> None:
        self.key, self.divided, self.planner, self.told = key, divided, planner, told

    def __call__(self, graph: Graph) -> None:
        kind = "forward" if self.divided.forward_next else "inference"
        if any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
            kind = "backward"
        if kind == "forward":
            self.divided.forward_next = False
        self.told(self.planner(graph, kind))


def of_inductor(
    partition: Partition, planner: Planner, report: Callable[[dict[str, Any]], None], mode: str, known: Any
) -> Any:
    """A backend of torch.compile. report: takes what the passes did, once per graph. known: a string for each graph
    that names all that it depends on, or None for one that no cache may hold."""

    def backend(gm: GraphModule, inputs: Any) -> Any:
        kept = KeptReport(known(gm), report)
        divided = Partitioner(kept.key, partition)
        patches: dict[str, Any] = {
            "custom_partitioner_fn": divided,
            "post_grad_custom_post_pass": Planned(kept.key, divided, planner, kept.add),
            **list_mode_options(mode),
        }
        if hasattr(config, "reorder_for_peak_memory"):
            patches["reorder_for_peak_memory"] = False  # it would undo what the passes moved
        _forget_hashes(inputs)
        made = compile_fx(gm, inputs, config_patches=patches)
        kept.tell()
        return made

    return backend


def _forget_hashes(inputs: Any) -> None:
    """A mesh remembers its hash, which Python draws anew in each process; torch's keys hold all that it remembers."""
    for given in inputs:
        mesh = getattr(given, "real_obj", given)
        if isinstance(mesh, DeviceMesh):
            for one in (mesh, mesh._get_root_mesh()):
                if hasattr(one, "_hash"):
                    one._hash = None  # computed again when it is asked for
