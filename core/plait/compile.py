"""The core's answer to the compile hook: compile each block, then wrap it in recomputation, in this order."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from plait.config import Compile
from plait.run import Run
from plait.spec import ModelSpec

# What selective recomputation keeps: products of matrices and attention, dear to compute; the rest is cheap.
KEPT = tuple(
    overload
    for op in (
        "mm", "bmm", "addmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    )
    if (packet := getattr(torch.ops.aten, op, None)) is not None
    for overload in [packet.default]
)  # fmt: skip


def compile_blocks(model: nn.Module, mesh: object, spec: ModelSpec, run: Run) -> nn.Module:
    """Every block's forward is compiled, then recomputed, as `compile.*` and `remat.mode` say.

    Only forward is replaced, on the instance: names of parameters stay, and hooks that strategies hang on a block
    run outside. A module that wishes to stay outside the graph marks its forward with `torch.compiler.disable`.
    """
    options, mode = run.config.compile, run.config.remat.mode
    for block in spec.blocks_of(model).values():
        if options.enabled:
            block.forward = compiled(block.forward, options)
        if mode == "selective" and options.enabled and options.backend == "inductor":
            block.forward = recomputed_by_compiler(block.forward)
        elif mode != "none":
            block.forward = recomputed(block.forward, mode)
    return model


def compiled(forward: Callable[..., Any], options: Compile) -> Callable[..., Any]:
    return torch.compile(forward, backend=options.backend, fullgraph=options.fullgraph)


def recomputed(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`forward`, of whose activations the backward pass recomputes all ("full") or the cheap ones ("selective")."""
    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}

    @functools.wraps(forward)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **contexts, **kwargs)

    return recompute


def recomputed_by_compiler(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same as "selective" for a forward that inductor compiles: its kernels are closed to `checkpoint`.

    The partitioner, which decides when the first call compiles, keeps what is dear and recomputes the rest.
    """

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._functorch.config.patch(aggressive_recomputation=True):
            return forward(*args, **kwargs)

    return call


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
