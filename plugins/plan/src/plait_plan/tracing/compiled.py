"""Compiled blocks in a trace: inductor divides them into forward and backward, and their operators run one by one.

So it keeps for backward what it keeps in the run. Needs `compile_fx` and `config` of `torch._inductor`,
`torch._functorch.config`, and `torch.fx.graph._BoxedCodeGen`, in torch 2.11 to 2.15. Tests:
plugins/plan/tests/test_compiled.py.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from plait_plan.tracing.fused import LOSS
from plait_plan.tracing.where import Where


@contextmanager
def graphs_alone(where: Where) -> Iterator[None]:
    """Inside, inductor decomposes, divides and simplifies graphs as ever, but makes no kernels of them.

    What is compiled outside of blocks is the loss.
    """
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx, config

    torch.compiler.reset()  # blocks of another trace are other code
    graphs = functools.partial(compile_fx.compile_fx, inner_compile=functools.partial(_run, where))
    with (
        mock.patch.object(compile_fx, "compile_fx", graphs),
        config.patch(fx_graph_cache=False),  # it may hold kernels for such graphs, from a real run
        functorch.patch(enable_autograd_cache=False),
    ):
        yield
    torch.compiler.reset()


def _run(where: Where, module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    for node in module.graph.nodes:
        node.target = PLAIN.get(getattr(node.target, "__name__", ""), node.target)
    module.graph.set_codegen(fx.graph._BoxedCodeGen())  # what backward was given is freed when it has been read
    module.recompile()

    def call(args: list[Any]) -> Any:
        with where.inside(LOSS) if where.in_the_open() else nullcontext():
            return module(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _keeps_state(operator: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    return torch.empty(16, dtype=torch.uint8), operator(*args, **kwargs)


def _with_state(state: Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


# What runs an operator again with the same random numbers; a recorder would see no operator inside.
PLAIN = {"run_and_save_rng_state": _keeps_state, "run_with_rng_state": _with_state}
