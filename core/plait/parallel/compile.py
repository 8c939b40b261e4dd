"""The core's answer to the compile hook: compile each block, then wrap it in recomputation, in this order."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from plait.contract.config import Compile
from plait.contract.model_spec import ModelSpec
from plait.contract.run import Run
from plait.parallel.mesh import Mesh
from plait.system.torch_internals.compiler import call_outside_of_graph, has_partitioner_option, partitioner_options

# What selective recomputation keeps: matrix products and attention, which are expensive, and what crossed ranks; the
# rest is cheap. By name, because some operations exist only after their module is imported.
SELECTIVE_KEEPS = frozenset((
    "aten::mm", "aten::bmm", "aten::addmm", "aten::_grouped_mm", "plait::grouped_linear",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "_c10d_functional::all_to_all_single",
))  # fmt: skip

# Backends whose partitioner divides a block's graph. It recomputes only what backward reads; `checkpoint` around
# compiled code recomputes the block's result too, one product more.
PARTITIONED = ("inductor", "aot_eager")


def compile_blocks(model: nn.Module, mesh: Mesh, spec: ModelSpec, run: Run) -> nn.Module:
    """Every block's forward is compiled, then recomputed, as `compile.*` and `remat.*` say.

    Only forward is replaced, on the instance: names of parameters stay, and strategies' hooks on a block run outside. A
    module inside that is marked by `outside_of_graph` runs between two graphs of its block.
    """
    options, remat = run.config.compile, run.config.remat
    # Otherwise graphs hold meshes, which torch's partitioner keeps in the wrong order beside states of generators.
    only_batch = all(axis.splits == "batch" for axis in mesh.layout.dense if axis.degree > 1)
    for fqn, block in spec.blocks_of(model).items():
        mode = remat.mode_of(fqn)
        whole = True
        if options.enabled:
            whole = not _leave_outside(block, options)
            block.forward = compiled(block.forward, options, fullgraph=options.fullgraph and whole)
        if mode == "budget":
            block.forward = recomputed_by_compiler(block.forward, **budget_config(remat.budget))
        elif mode == "selective" and options.enabled and options.backend == "inductor":
            block.forward = recomputed_by_compiler(block.forward, **selective_config())
        elif mode == "full" and options.enabled and options.backend in PARTITIONED and whole and only_batch:
            block.forward = recomputed_by_compiler(block.forward, **full_config())
        elif mode != "none":
            block.forward = recomputed(block.forward, mode)
    return model


def outside_of_graph(module: nn.Module, why: str) -> None:
    """Mark `module`, whose call cannot be part of a compiled block, for example because its hooks depend on data.

    Its own forward is then compiled separately, for inputs of any size; hooks stay outside. why: a clause for logs.
    """
    module.__dict__["_outside_of_graph"] = why


def _leave_outside(block: nn.Module, options: Compile) -> bool:
    """End the graph of `block` before marked modules, and continue after them; returns whether there are any."""
    marked = [(m, m.__dict__["_outside_of_graph"]) for m in block.modules() if "_outside_of_graph" in m.__dict__]
    for module, why in marked:
        call_outside_of_graph(module, why)
        module.forward = compiled(module.forward, options, fullgraph=options.fullgraph, dynamic=True)
    return bool(marked)


def compiled(
    forward: Callable[..., Any], options: Compile, fullgraph: bool, dynamic: bool | None = None
) -> Callable[..., Any]:
    if options.backend != "inductor":  # others have no modes and no passes
        return torch.compile(forward, backend=options.backend, fullgraph=fullgraph, dynamic=dynamic)
    from plait.system.torch_internals.idle_casts import options_of

    return torch.compile(forward, options=options_of(options.mode), fullgraph=fullgraph, dynamic=dynamic)


def recomputed(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`forward`, whose backward recomputes all activations ("full") or the cheap ones ("selective")."""
    contexts: dict[str, Any] = {"context_fn": _contexts} if mode == "selective" else {}

    @functools.wraps(forward)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **contexts, **kwargs)

    return recompute


def recomputed_by_compiler(forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """A compiled forward, whose activations the compiler's partitioner keeps or recomputes.

    how: `partitioner_options` for the calls, of which the first compiles.
    """
    name = getattr(how.get("joint_custom_pass"), "__name__", "")  # caches do not see the pass
    tag = f"{torch.compiler.config.cache_key_tag} plait {name} {sorted(SELECTIVE_KEEPS)}"

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with partitioner_options(**how), torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            return forward(*args, **kwargs)

    return call


def selective_config() -> dict[str, Any]:
    """`partitioner_options` for `remat.mode=selective` under inductor, whose kernels are opaque to `checkpoint`."""
    return {"aggressive_recomputation": True, "joint_custom_pass": keep_selected}


def keep_selected(joint: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    """Have the partitioner keep what `selective` keeps: its own list lacks some kernels of attention and grouped
    products."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and hasattr(node.target, "name") and node.target.name() in SELECTIVE_KEEPS:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return joint


def full_config() -> dict[str, Any]:
    """`partitioner_options` for `remat.mode=full`."""
    return {"joint_custom_pass": recompute_all}


def recompute_all(joint: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    """Have the partitioner keep only the inputs of a block."""
    for node in joint.graph.nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward"
        if node.op == "call_function" and not backward and isinstance(node.meta.get("val"), Tensor | tuple | list):
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
    return joint


def budget_config(budget: float) -> dict[str, Any]:
    """Settings to patch into `torch._functorch.config` while a compile hook of your own partitions a graph, for
    `remat.mode=budget`. budget: the share (0 to 1) that is kept of what `remat.mode=none` keeps."""
    # The objects in our graphs are meshes, which have no size.
    config = {"activation_memory_budget": budget}
    objects = "unsafe_treat_script_objects_as_zero_size"  # not in torch 2.11
    return config | ({objects: True} if has_partitioner_option(objects) else {})


def _contexts() -> list[Any]:
    """The contexts that `checkpoint` enters in forward and in recomputation.

    torch's own also count operations whose results are not kept. They fail if recomputation runs other operations than
    forward, as it does if a module inside gathers its parameters again, or does not.
    """
    modes: Any = create_selective_checkpoint_contexts(_policy)
    for mode in modes:
        mode.__class__ = _kept_alone(mode.__class__)
    return list(modes)


@functools.cache
def _kept_alone(cls: Any) -> Any:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in SELECTIVE_KEEPS:
            return cls.__torch_dispatch__(self, func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    return type(cls.__name__, (cls,), {"__torch_dispatch__": dispatch})


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE
