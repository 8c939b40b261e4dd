"""Whether backward gathers a unit again: not if it needs none of its parameters, as after a look-up in an embedding."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from plait_fsdp2.torch_internals import memory_of


def gather_again_if_kept(modules: list[nn.Module]) -> None:
    """Gather the parameters of `modules`, a unit of FSDP2, in backward only if forward keeps any of them for it.

    Their first forward with gradients shows that; until then they are gathered.
    """
    unseen, kept = set(modules), set[int]()

    def look(module: Any) -> None:
        plain = module.forward

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if module not in unseen or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            with saved_tensors_hooks(note, lambda tensor: tensor):
                result = plain(*args, **kwargs)
            unseen.discard(module)
            if not unseen and kept.isdisjoint(memory_of(p) for m in modules for p in m.parameters()):
                module.set_unshard_in_backward(False)
            return result

        module.forward = forward

    def note(tensor: Tensor) -> Tensor:
        kept.add(memory_of(tensor))
        return tensor

    for module in modules:
        look(module)
