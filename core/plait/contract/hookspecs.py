"""The whole contract between the core and a strategy. A complete strategy:

    from fnmatch import fnmatch
    import attrs, plait


    @attrs.define
    class Freeze:
        phase = "model"
        names: str = "*norm.weight"

        @plait.hookimpl
        def parallelize(self, model):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not fnmatch(name, self.names))

A strategy is an attrs class that an entry point in the group `plait.strategies` names. Its fields are its options (what
it keeps for itself are fields with `init=False`), its methods marked `@plait.hookimpl` are hooks, and a few plain class
attributes say how it combines with others:

    phase     when it acts: "model" (changes what modules compute), "stages" (cuts the model), "graph" (changes
              parameters inside the graph) or "runtime" (wraps what was compiled); default "runtime"
    before    names of strategies that must act after this one, if they are selected; `after` is the reverse
    claims    roles that only one strategy of a run may have: "parameter_sharding", "gradient_sum", "sequence",
              "stages"
    numerics  "exact" (equals one process), or "own" (differs on purpose and has its own reference)
    distance  with "own" numerics: how far the gradient of a parameter may be from that of exact training, as a part of
              it, such as 0.05; at most 0.4, so that a factor of 2 or one half is noticed
    hooks_off names of its own hooks that its options switch off, often a property: such a hook does not count, so that
              another strategy of the run may have it
    replicas  of ranks along its axes with sums=False, each of which saves its own values: what a run with another
              number of them loads, the "mean" or the "first" of the saved; "refuse": such a run is refused
    decides   keys of the run that it sets in `configure`, such as "remat.mode"; a hardware file sets none of them

A hook takes any subset of its arguments, by name:

    run         plait.Run: config, world size, device type, the model's spec, the other strategies
    world_size  how many ranks the run has
    model       the module, or one of this rank's stages; its parameters may be on the meta device until set-up ends
    parts       what this rank runs: the model, or its stages in the order in which data passes them
    inputs      of each micro-batch the arguments of the model, a tuple; iterate over them once
    loss        loss(i, logits) of micro-batch i: call it once, where its logits are, and backward on what it returns
    mesh        plait.Mesh: process groups by axis, and which ranks sum a parameter's gradient
    spec        plait.ModelSpec: what the model says about its tensors, blocks and branches
    optimizer   torch's, over all parameters of this rank; None if only weights are wanted
    tokens, labels, positions
                of a batch, (B, T) each; positions restart at 0 at each document, None: a row is one document
    parameters  every parameter of this rank; a tied one once
    max_norm    the norm that gradients are clipped to; inf: they are only measured
    norm_type   which norm: 2.0, or inf
    groups      what an optimizer gets: dicts with `params`, of each its `names`, `logical` axes and `block`, and their
                one `mesh`
    make        make(groups) builds the optimizer that the run asks for; call it once, on all ranks
    step        number of the finished step, from 1
    micro       how many micro-batches a step has
    state       FQN -> parameter or persistent buffer of this rank, with its live values
"""

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:  # `import plait` must not import torch
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from plait.contract.axes import MeshAxis, MeshView
    from plait.contract.choices import Choice
    from plait.contract.exported import Export
    from plait.contract.mesh import Mesh
    from plait.contract.model_spec import ModelSpec
    from plait.contract.run import Run
    from plait.contract.stage_plan import StagePlan

API = 1  # removals and changes raise it; new hooks and new arguments do not
APIS = range(1, API + 1)  # the versions that this core supports

hookspec = pluggy.HookspecMarker("plait")
hookimpl = pluggy.HookimplMarker("plait")


@hookspec
def configure(run: "Run") -> None:
    """May select and configure further strategies, before mesh and layout are checked. Each instance is asked once; a
    start may make several, one for each number of ranks that it checks. Ranks that a launcher starts read the result.
    """


@hookspec
def extend(model: "nn.Module", spec: "ModelSpec", run: "Run") -> "ModelSpec | None":
    """Adds parameters, on meta, to the whole model or freezes some; returns the spec with what it added."""


@hookspec
def build_mesh(run: "Run", world_size: int) -> "Iterable[MeshAxis | MeshView]":  # type: ignore[empty-body]
    """Returns the strategy's axes and views. The core assembles them, fills in -1 and rejects what does not fit."""


@hookspec
def choices(run: "Run", world_size: int) -> "Iterable[Choice]":  # type: ignore[empty-body]
    """Returns the options that a search for a layout may set, each with all values that fit this run."""


@hookspec
def parallelize(model: "nn.Module", mesh: "Mesh", spec: "ModelSpec", run: "Run") -> "nn.Module | list[Any] | None":
    """Changes the model in place, or returns a new one; in phase "stages" also a list of this rank's stages."""


@hookspec(firstresult=True)
def compile(model: "nn.Module", mesh: "Mesh", spec: "ModelSpec", run: "Run") -> "nn.Module | None":
    """Compiles the model and recomputes activations. The core's own compiles block by block."""


@hookspec(firstresult=True)
def deal(
    tokens: "torch.Tensor", labels: "torch.Tensor", positions: "torch.Tensor | None", mesh: "Mesh"
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None":
    """Returns this rank's part of each row, if an axis splits sequences. Default: one contiguous stretch per rank."""


@hookspec(firstresult=True)
def forward_backward(
    parts: "list[nn.Module]", inputs: "Iterable[tuple[Any, ...]]", loss: "Callable[..., torch.Tensor]", mesh: "Mesh"
) -> "bool | None":
    """Runs the micro-batches of a step: forward, loss, and backward if gradients are on. True: all is done."""


@hookspec(firstresult=True)
def plan_stages(model: "nn.Module", spec: "ModelSpec", run: "Run", micro: int) -> "StagePlan | None":
    """Returns which blocks each stage has, and what each rank runs in which order. Only plans call it."""


@hookspec(firstresult=True)
def optimizer(
    groups: "list[dict[str, Any]]", make: "Callable[..., torch.optim.Optimizer]", mesh: "Mesh"
) -> "torch.optim.Optimizer | None":
    """Returns the optimizer over all parameters of this rank; a run steps no other. Default: make(groups)."""


@hookspec(firstresult=True)
def checkpoint(
    model: "nn.Module", optimizer: "torch.optim.Optimizer | None", mesh: "Mesh", spec: "ModelSpec"
) -> "dict[str, Any] | tuple[dict[str, Any], Callable[[], None]] | None":
    """Returns the state by canonical FQN, aliasing the live tensors; or (state, function to call after loading)."""


@hookspec
def state(
    model: "nn.Module", optimizer: "torch.optim.Optimizer", mesh: "Mesh", run: "Run"
) -> "dict[str, torch.Tensor] | None":
    """Returns what the strategy keeps beside parameters, by name: live, and the same tensors at every call."""


@hookspec(firstresult=True)
def export(state: "dict[str, torch.Tensor]", spec: "ModelSpec", run: "Run") -> "Export | None":
    """Returns what the exported folder holds. The core's own is all weights, and the model's own files."""


@hookspec(firstresult=True)
def clip_grads(
    parameters: "list[nn.Parameter]", max_norm: float, mesh: "Mesh", norm_type: float
) -> "torch.Tensor | None":
    """Clips in place and returns the total norm. The core's own handles parameters on several meshes."""


@hookspec
def after_step(model: "nn.Module", optimizer: "torch.optim.Optimizer", mesh: "Mesh", step: int, run: "Run") -> None:
    """Called once per step, after the optimizer. `step` counts from 1. `run.log` puts a value into the step's row."""


FOLDS = ("extend", "parallelize")
FIRST_RESULT = tuple(name for name, hook in globals().items() if getattr(hook, "plait_spec", {}).get("firstresult"))
