"""What a compiled graph depends on beyond what torch's caches see, and the reports of graphs in these caches."""

import functools
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from plait import SELECTIVE_KEEPS, Run, budget_config
from plait_simplefsdp.torch_internals import OperatorBase, cache_folder, groups


@functools.cache
def code() -> str:
    """A digest of this package's code: another version makes other graphs."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def stored(model: nn.Module) -> list[Any]:
    """Of each parameter and buffer all but its values. A tied one is there under each of its names, with one number."""
    numbers: dict[int, int] = {}
    entries = []
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        number = numbers.setdefault(id(tensor), len(numbers))
        local = tensor.detach()
        where: list[Any] = []
        if isinstance(local, DTensor):
            mesh = local.device_mesh
            where = [mesh.mesh.tolist(), list(mesh.mesh_dim_names or ()), [str(p) for p in local.placements]]
            local = local.to_local()
        shapes = [list(tensor.shape), list(local.shape), list(local.stride()), str(tensor.dtype)]
        entries.append([name, number, tensor.requires_grad, local.device.type, *shapes, where])
    return entries


def traced(gm: GraphModule) -> list[Any]:
    """The graph, and which block and parameter each node belongs to, which the caches of torch do not see."""
    return [
        [node.op, node.name, called(node.target), str(node.args), str(node.kwargs), node.meta.get("custom")]
        for node in gm.graph.nodes
    ]


def called(target: Any) -> str:
    """The name of what a node calls. Raises Unknown for a function that is made in place, since a name is not all."""
    if isinstance(target, str):
        return target
    if getattr(target, "__closure__", None):
        raise Unknown(target)
    if isinstance(target, OperatorBase):
        return str(target)
    return f"{target.__module__}.{getattr(target, '__qualname__', target.__name__)}"


class Unknown(Exception):
    """A graph depends on something of which no text says all; it is compiled anew at each start."""


def key_of(gm: GraphModule, model: nn.Module, run: Run, **given: Any) -> str | None:
    """A digest of all that the graphs made of `gm` depend on; None: they must not be cached. given: what partition and
    passes get."""
    try:
        graph = traced(gm)
    except Unknown:
        return None
    config = run.config
    parts = {
        "code": code(),
        "core": [version("plait"), sorted(SELECTIVE_KEEPS), budget_config(config.remat.budget)],
        "config": [config.compile, config.remat, config.precision],
        "rank": [dist.get_rank(), dist.get_world_size(), run.device_type],
        "groups": groups(),  # a graph names those that it sends over
        "stored": stored(model),
        "traced": graph,
        "given": given,
    }
    return hashlib.sha256(json.dumps(plain(parts)).encode()).hexdigest()


def plain(value: Any) -> Any:
    """`value` as JSON. An unknown type is an error: its text could be the same for different values."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return sorted([str(key), plain(entry)] for key, entry in value.items())
    if isinstance(value, set | frozenset):
        return sorted(plain(entry) for entry in value)
    if isinstance(value, torch.dtype):
        return str(value)
    if attrs.has(type(value)):
        return [
            type(value).__name__,
            {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))},
        ]
    raise TypeError(f"a graph depends on {value!r}, and a key holds no {type(value).__name__}")


class KeptReport:
    """The report of the graphs of one joint graph, in a file beside torch's caches.

    `known` is their `key_of`. `key`, which the caches get, also holds a random part that is written
    with the report: so a graph in a cache without its report is not found, and a report always belongs to its graph.
    """

    def __init__(self, known: str | None, report: Callable[[dict[str, Any]], None]) -> None:
        self.report = report
        self.file = cache_folder() / "plait_simplefsdp" / f"{known}.json" if known else None
        self.before, self.drawn = _read(self.file) if self.file else ({}, "")
        self.key = f"{known} {self.drawn}" if known else None
        self.graphs: dict[str, dict[str, Any]] = {}  # reported in this process

    def add(self, found: dict[str, Any]) -> None:
        """A graph was compiled here."""
        kind = found["graph"]
        if kind in self.graphs:
            return
        self.graphs[kind] = found
        self.report(found)
        if self.file:
            _write(self.file, {"drawn": self.drawn, "graphs": {**self.before, **self.graphs}})

    def tell(self) -> None:
        """Report the graphs that were not compiled here, because they came from a cache."""
        for kind, found in self.before.items():
            if kind not in self.graphs:
                self.graphs[kind] = found
                self.report(found)


def _read(file: Path) -> tuple[dict[str, Any], str]:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return dict(kept["graphs"]), str(kept["drawn"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or what a full disk left
        return {}, uuid.uuid4().hex


def _write(file: Path, found: Any) -> None:
    """All of it or nothing: another rank or run may read meanwhile. A cache that cannot be written stays empty."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(found), encoding="utf-8")
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
