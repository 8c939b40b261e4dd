"""Compiles the whole model as one graph: tags on the joint graph, passes on its two halves."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.traceback import annotate

from plait import Mesh, ModelSpec, PlaitError, Run
from plait_simplefsdp.cached import key_of
from plait_simplefsdp.collectives import GATHER, REDUCE, SCATTER
from plait_simplefsdp.estimate import Machine
from plait_simplefsdp.partition import divide
from plait_simplefsdp.plan import plan
from plait_simplefsdp.recompute import BLOCK
from plait_simplefsdp.report import Report
from plait_simplefsdp.torch_internals import aot_autograd, of_any_size, values_as_sizes

Partition = Callable[..., tuple[GraphModule, GraphModule]]
Planner = Callable[[Graph, str], dict[str, Any]]  # of a "forward", "backward" or "inference" graph, in place


def compile_whole(
    model: nn.Module, mesh: Mesh, spec: ModelSpec, run: Run, reshard_after_forward: str, passes: list[str]
) -> nn.Module:
    """The model's forward becomes one graph; hooks on the model itself stay outside."""
    backend = run.config.compile.backend
    blocks = spec.blocks_of(model)
    for fqn, block in blocks.items():
        block.forward = _named(block.forward, fqn)
    names = list(blocks)
    again = set({"default": names[:-1], "always": names, "never": []}[reshard_after_forward])
    fused = backend == "inductor"
    partition = functools.partial(divide, blocks=names, again=again, remat=run.config.remat, fused=fused)
    report, machine, expected = Report(run), Machine.of(run.cluster), expected_in(model, mesh)

    def planner(graph: Graph, kind: str) -> dict[str, Any]:
        return plan(graph, kind, passes, machine, expected["backward" if kind == "backward" else "forward"])

    def known(gm: GraphModule) -> str | None:
        return key_of(gm, model, run, passes=passes, machine=machine, expected=expected, blocks=names, again=again)

    if fused:
        from plait_simplefsdp.inductor import of_inductor

        made = of_inductor(partition, planner, report.add, run.config.compile.mode, known)
    else:
        made = _of_aot(partition, planner, report.add)
    whole = torch.compile(model.forward, backend=made, fullgraph=True)
    model.forward = _of_any_size(whole)
    return model


def expected_in(model: nn.Module, mesh: Mesh) -> dict[str, set[str]]:
    """The kinds of collectives that parameters need in forward, and their gradients in backward."""
    expected: dict[str, set[str]] = {"forward": set(), "backward": set()}
    for param in model.parameters():
        data = mesh.data(param, outer="dp_replicate")
        sizes = [1, *data.shape][-2:] if data is not None else [1, 1]
        if sizes[1] > 1:
            expected["forward"].add(GATHER)
        if param.requires_grad:
            expected["backward"] |= {kind for kind, size in zip((REDUCE, SCATTER), sizes, strict=True) if size > 1}
    return expected


def _of_any_size(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One graph for every number of samples; values read from tensors (how many rows go to which rank) become sizes
    in it."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.Tensor):
                of_any_size(given)
        try:
            with values_as_sizes():
                return forward(*args, **kwargs)
        except Exception as error:
            if (own := _own_error(error)) is not None:
                raise own from None
            raise

    return call


def _own_error(error: BaseException | None) -> PlaitError | None:
    """The original message inside torch.compile's error."""
    while error is not None and not isinstance(error, PlaitError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


def _named(forward: Callable[..., Any], fqn: str) -> Callable[..., Any]:
    """`forward`, whose nodes in the graph record the block that they belong to."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with annotate({BLOCK: fqn}):
            return forward(*args, **kwargs)

    return call


def _of_aot(partition: Partition, planner: Planner, report: Callable[[dict[str, Any]], None]) -> Any:
    from functorch.compile import make_boxed_func

    def compiler(kind: str) -> Any:
        def compiled(module: GraphModule, inputs: Any) -> Any:
            report(planner(module.graph, kind))
            module.recompile()
            return make_boxed_func(module.forward)

        return compiled

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
