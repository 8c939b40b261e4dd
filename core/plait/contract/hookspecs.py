"""The whole contract between the core and a strategy.

A strategy is an attrs class named by an entry point in the group `plait.strategies`. Its fields are its options, its
methods marked `@plait.hookimpl` are hooks, and a few plain class attributes say where it belongs:

    stage     "model" (rewrites what modules compute), "graph" (rewrites parameters inside the graph) or "runtime"
              (wraps what was compiled); default "runtime"
    before    names of strategies that must act after this one, where they are selected; likewise `after`
    claims    roles that one strategy of a run may fill: "parameter_sharding", "gradient_sum"
    numerics  "exact" (equals one process), or "own" (differs on purpose and brings its own reference)

A hook takes any subset of the arguments below, by name.
"""

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:  # torch stays out of `import plait`
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from plait.contract.axes import MeshAxis, MeshView
    from plait.contract.choices import Choice
    from plait.contract.model_spec import ModelSpec
    from plait.contract.run import Run
    from plait.parallel.mesh import Mesh

API = 1  # raised by removals and changes; new hooks and new arguments do not raise it
APIS = range(1, API + 1)  # the versions this core runs

hookspec = pluggy.HookspecMarker("plait")
hookimpl = pluggy.HookimplMarker("plait")


@hookspec
def configure(run: "Run") -> None:
    """All, in order; once, in the parent, before anything is checked: may select and configure further strategies."""


@hookspec
def build_mesh(run: "Run", world_size: int) -> "Iterable[MeshAxis | MeshView]":  # type: ignore[empty-body]
    """All answer: the strategy's axes and views. The core joins them, fills in -1 and refuses what does not fit."""


@hookspec
def choices(run: "Run", world_size: int) -> "Iterable[Choice]":  # type: ignore[empty-body]
    """All may answer: options that a search for a layout may set, each with all the values that fit this run."""


@hookspec
def parallelize(model: "nn.Module", mesh: "Mesh", spec: "ModelSpec", run: "Run") -> "nn.Module | None":
    """A fold: change the model in place, or return a new one. Parameters may be on the meta device."""


@hookspec(firstresult=True)
def compile(model: "nn.Module", mesh: "Mesh", spec: "ModelSpec", run: "Run") -> "nn.Module | None":
    """One strategy at most: owns compilation and recomputation of activations. Default: block by block."""


@hookspec(firstresult=True)
def checkpoint(
    model: "nn.Module", optimizer: "torch.optim.Optimizer | None", mesh: "Mesh", spec: "ModelSpec"
) -> "dict[str, Any] | tuple[dict[str, Any], Callable[[], None]] | None":
    """One strategy at most: the state by canonical FQN, aliasing what is live; or (it, what to do after loading)."""


@hookspec(firstresult=True)
def clip_grads(
    parameters: "list[nn.Parameter]", max_norm: float, mesh: "Mesh", norm_type: float
) -> "torch.Tensor | None":
    """One strategy at most: clip in place and return the total norm. Default: by the parameters' own meshes."""


@hookspec
def after_step(model: "nn.Module", optimizer: "torch.optim.Optimizer", mesh: "Mesh", step: int) -> None:
    """All, in order: one call a step, after the optimizer. `step` counts from 1."""


FOLDS = ("parallelize",)
FIRST_RESULT = ("compile", "checkpoint", "clip_grads")
