"""torch's compiler: its settings, its backends, what it says of its progress, and how a module is kept out of a graph.

Needs `torch._functorch.config`, `torch._dynamo.list_backends`, `torch._dynamo.callback.callback_handler`, and the
attributes `_compiled_call_impl` and `_call_impl` of modules and `_torchdynamo_orig_callable` of compiled functions, in
torch 2.11 to 2.15. Tests: tests/system/test_torch_internals.py.
"""

import sys
from contextlib import AbstractContextManager
from typing import Any

COMPILER = "torch._dynamo"  # a module that takes seconds to import
COMPILER_PACKAGES = (COMPILER, "torch._inductor", "torch._functorch", "triton")  # where its errors come from
_ORIGINAL = "_torchdynamo_orig_callable"  # where `torch.compile` keeps what it compiles


def partitioner_options(**options: Any) -> AbstractContextManager[Any]:
    """Inside, the partitioner of forward and backward has these options of `torch._functorch.config`."""
    import torch._functorch.config

    return torch._functorch.config.patch(**options)


def has_partitioner_option(name: str) -> bool:
    import torch._functorch.config

    return hasattr(torch._functorch.config, name)


def backends() -> tuple[str, ...]:
    """The names that `torch.compile` takes as its backend."""
    from torch._dynamo import list_backends

    return tuple(list_backends(exclude_tags=()))


def is_imported() -> bool:
    return COMPILER in sys.modules


def progress() -> Any:
    """What `register_start_callback` and its like are called on, to hear when a graph compiles; None if the compiler
    has not been imported."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return handler if hasattr(handler, "register_start_callback") else None


def call_outside_of_graph(module: Any, why: str) -> None:
    """Have calls of `module` end a graph that is being compiled. why: a clause for logs."""
    import torch

    module._compiled_call_impl = torch.compiler.disable(module._call_impl, reason=why)  # torch's own place for it


def has_compiled_call(module: Any) -> bool:
    """Whether calls of `module` itself, not of its forward, were replaced by compiled ones."""
    return module._compiled_call_impl is not None


def original(function: Any) -> Any:
    """What `torch.compile` made `function` of; None if it did not make it."""
    return getattr(function, _ORIGINAL, None)
