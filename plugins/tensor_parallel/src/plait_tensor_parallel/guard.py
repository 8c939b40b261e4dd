"""Contexts that are active during a module's forward: the ban on implicit redistribution, inductor's overlap."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from plait import ModelSpec, PlaitError
from plait_tensor_parallel.torch_internals import allow_overlap, explicit_redistribution, overlapping


def forbid_hidden_movement(model: nn.Module, spec: ModelSpec, compiled: bool) -> None:
    """Raise an error that names the module if forward redistributes data implicitly.

    Inside a compiled block the error names the block.
    """
    if (context := explicit_redistribution()) is None:
        raise PlaitError("strategy.tensor_parallel.explicit=true needs a torch that can forbid it; this one cannot").at(
            "strategy.tensor_parallel.explicit", True, fits=(False,)
        )

    inside = list(spec.blocks_of(model)) if compiled else []
    for fqn, module in model.named_modules():
        if not any(fqn.startswith(f"{block}.") for block in inside):
            _name_in_errors(module, fqn)
    during(model, context)


def overlap(model: nn.Module, axis: Any, spec: ModelSpec) -> None:
    """Let inductor split collectives and matrix products of every block into pieces that overlap."""
    allow_overlap(axis.get_group().group_name)
    for block in spec.blocks_of(model).values():
        during(block, overlapping)


def during(module: nn.Module, make: Callable[[], AbstractContextManager]) -> None:
    """Run each forward of `module` inside a new context."""
    entered: list[AbstractContextManager] = []

    def before(module: nn.Module, args: Any) -> None:
        entered.append(make())
        entered[-1].__enter__()

    def after(module: nn.Module, args: Any, result: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)


def _name_in_errors(module: nn.Module, fqn: str) -> None:
    def name(module: nn.Module, args: Any, result: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, RuntimeError) and "redistribution" in str(error) and not hasattr(error, "__notes__"):
            where = f"module {fqn!r}" if fqn else "the model's own forward"
            error.add_note(
                f"in {where}: strategy.tensor_parallel.explicit=true forbids redistribution other than Plait's own"
            )

    module.register_forward_hook(name, always_call=True)
