"""Plait: parallel training strategies as plugins that combine into one training run. Importing it imports no torch."""

from typing import TYPE_CHECKING, Any

from plait.contract.axes import MeshAxis, MeshView, divisors, valid_degree
from plait.contract.choices import Choice
from plait.contract.config import Compile, Config, Loss, Precision, Remat, Schedule
from plait.contract.errors import PlaitError
from plait.contract.hookspecs import hookimpl
from plait.contract.model_spec import ModelSpec
from plait.contract.planned import is_planning, planned_split, read_values
from plait.contract.run import Run

if TYPE_CHECKING:
    from plait.contract.exported import Export
    from plait.contract.stage_plan import StageAction, StagePlan
    from plait.contract.weight_part import WeightPart
    from plait.models.attention import attend
    from plait.parallel.apply import Applied, apply
    from plait.parallel.chunked_loss import divide_head
    from plait.parallel.compile import SELECTIVE_KEEPS, budget_config, outside_of_graph
    from plait.parallel.initialize import held_indices
    from plait.parallel.loss import cross_entropy_sum
    from plait.parallel.mesh import Mesh
    from plait.parallel.mix_in import mix_in
    from plait.parallel.sharding import distribute_params, own_chunk, shard_dim
    from plait.parallel.stages import stage, stream_into
    from plait.parallel.transform import transform_param
    from plait.plan import planning

__version__ = "0.1.0"
__all__ = [
    "SELECTIVE_KEEPS",
    "Applied",
    "Choice",
    "Compile",
    "Config",
    "Export",
    "Loss",
    "Mesh",
    "MeshAxis",
    "MeshView",
    "ModelSpec",
    "PlaitError",
    "Precision",
    "Remat",
    "Run",
    "Schedule",
    "StageAction",
    "StagePlan",
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
    "is_planning",
    "mix_in",
    "outside_of_graph",
    "own_chunk",
    "planned_split",
    "planning",
    "read_values",
    "shard_dim",
    "stage",
    "stream_into",
    "transform_param",
    "valid_degree",
]

_LAZY = {
    "Export": "plait.contract.exported",
    "apply": "plait.parallel.apply",
    "Applied": "plait.parallel.apply",
    "Mesh": "plait.parallel.mesh",
    "mix_in": "plait.parallel.mix_in",
    "divide_head": "plait.parallel.chunked_loss",
    "distribute_params": "plait.parallel.sharding",
    "held_indices": "plait.parallel.initialize",
    "own_chunk": "plait.parallel.sharding",
    "shard_dim": "plait.parallel.sharding",
    "attend": "plait.models.attention",
    "stage": "plait.parallel.stages",
    "StageAction": "plait.contract.stage_plan",
    "StagePlan": "plait.contract.stage_plan",
    "WeightPart": "plait.contract.weight_part",
    "stream_into": "plait.parallel.stages",
    "transform_param": "plait.parallel.transform",
    "planning": "plait.plan.planning",
    "outside_of_graph": "plait.parallel.compile",
    "SELECTIVE_KEEPS": "plait.parallel.compile",
    "budget_config": "plait.parallel.compile",
    "cross_entropy_sum": "plait.parallel.loss",
}


def __getattr__(name: str) -> Any:
    """What needs torch, or is for plans alone, is imported when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_LAZY[name])
    return getattr(module, name, module)  # `planning` is a module
