"""Plait: parallel training strategies as plugins that combine into one training run. Importing it imports no torch."""

from typing import TYPE_CHECKING, Any

from plait.contract.axes import MeshAxis, MeshView, divisors, valid_degree
from plait.contract.choices import Choice
from plait.contract.config import Compile, Config, Loss, Precision, Remat, Schedule
from plait.contract.errors import PlaitError
from plait.contract.hookspecs import hookimpl
from plait.contract.model_spec import ModelSpec
from plait.contract.observer import Observer, RunObserver
from plait.contract.packed import Packed
from plait.contract.planned import is_planning, planned_split, read_values
from plait.contract.run import Run

if TYPE_CHECKING:
    from plait.contract.batch import Batch
    from plait.contract.exported import Export
    from plait.contract.stage_plan import StageAction, StagePlan
    from plait.contract.weight_part import WeightPart
    from plait.models.attention import attend
    from plait.parallel.apply import Applied, apply
    from plait.parallel.chunked_loss import divide_head
    from plait.parallel.compile import SELECTIVE_KEEPS, budget_config, outside_of_graph
    from plait.parallel.initialize import held_indices, own_chunk
    from plait.parallel.loss import cross_entropy_sum
    from plait.parallel.mesh import Mesh
    from plait.parallel.mix_in import mix_in
    from plait.parallel.sharding import distribute_params, shard_dim, shard_of_parts, whole_tensor
    from plait.parallel.stages import stage, stream_into
    from plait.parallel.state import is_loaded, room_for, twin_of
    from plait.parallel.step import Stepped
    from plait.parallel.transform import transform_param
    from plait.plan import planning

__version__ = "0.1.0"
__all__ = [
    "SELECTIVE_KEEPS",
    "Applied",
    "Batch",
    "Choice",
    "Compile",
    "Config",
    "Export",
    "Loss",
    "Mesh",
    "MeshAxis",
    "MeshView",
    "ModelSpec",
    "Observer",
    "Packed",
    "PlaitError",
    "Precision",
    "Remat",
    "Run",
    "RunObserver",
    "Schedule",
    "StageAction",
    "StagePlan",
    "Stepped",
    "WeightPart",
    "apply",
    "attend",
    "budget_config",
    "cross_entropy_sum",
    "distribute_params",
    "divide_head",
    "divisors",
    "held_indices",
    "hookimpl",
    "is_loaded",
    "is_planning",
    "mix_in",
    "outside_of_graph",
    "own_chunk",
    "planned_split",
    "planning",
    "read_values",
    "room_for",
    "shard_dim",
    "shard_of_parts",
    "stage",
    "stream_into",
    "transform_param",
    "twin_of",
    "valid_degree",
    "whole_tensor",
]

_LAZY = {
    "plait.contract.exported": ["Export"],
    "plait.contract.stage_plan": ["StageAction", "StagePlan"],
    "plait.contract.weight_part": ["WeightPart"],
    "plait.contract.batch": ["Batch"],
    "plait.models.attention": ["attend"],
    "plait.parallel.apply": ["Applied", "apply"],
    "plait.parallel.chunked_loss": ["divide_head"],
    "plait.parallel.compile": ["SELECTIVE_KEEPS", "budget_config", "outside_of_graph"],
    "plait.parallel.initialize": ["held_indices", "own_chunk"],
    "plait.parallel.loss": ["cross_entropy_sum"],
    "plait.parallel.mesh": ["Mesh"],
    "plait.parallel.mix_in": ["mix_in"],
    "plait.parallel.sharding": ["distribute_params", "shard_dim", "shard_of_parts", "whole_tensor"],
    "plait.parallel.stages": ["stage", "stream_into"],
    "plait.parallel.state": ["is_loaded", "room_for", "twin_of"],
    "plait.parallel.step": ["Stepped"],
    "plait.parallel.transform": ["transform_param"],
    "plait.plan.planning": ["planning"],
}


def __getattr__(name: str) -> Any:
    """What needs torch, or is for plans alone, is imported when it is first asked for."""
    if (where := next((module for module, names in _LAZY.items() if name in names), None)) is None:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(where)
    return getattr(module, name, module)  # `planning` is a module
