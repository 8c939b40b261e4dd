"""The core's own answers to the first-result hooks: a plugin of lowest rank, for hooks that no strategy answers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plait.contract.hookspecs import hookimpl
from plait.contract.model_spec import ModelSpec
from plait.contract.run import Run
from plait.parallel.clip import clip_grads
from plait.parallel.compile import compile_blocks
from plait.parallel.mesh import Mesh
from plait.parallel.state import canonical_state


class Defaults:
    """Compiles block by block, deals each rank a stretch of every sequence, runs one micro-batch after the other, takes
    the optimizer that the run asks for, saves parameters and optimizer state by name, clips over the parameters' own
    meshes."""

    @hookimpl
    def compile(self, model: nn.Module, mesh: Mesh, spec: ModelSpec, run: Run) -> nn.Module:
        return compile_blocks(model, mesh, spec, run)

    @hookimpl
    def deal(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None, mesh: Mesh
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        index, count = mesh.rank_and_size("sequence")
        if count == 1:
            return tokens, labels, positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        own, ours, at = (whole.tensor_split(count, dim=1)[index] for whole in (tokens, labels, positions))
        return own, ours, at

    @hookimpl
    def forward_backward(self, parts: list[nn.Module], inputs: Iterable[Any], loss: Callable[..., Tensor]) -> bool:
        for i, each in enumerate(inputs):
            scaled = loss(i, parts[0](*each))
            if torch.is_grad_enabled():
                scaled.backward()  # what strategies gave to autograd sums gradients over ranks: they are complete now
            del scaled
        return True

    @hookimpl
    def optimizer(
        self, groups: list[dict[str, Any]], make: Callable[..., torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        return make(groups)

    @hookimpl
    def checkpoint(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        return canonical_state(model, optimizer)

    @hookimpl
    def clip_grads(self, parameters: list[nn.Parameter], max_norm: float, mesh: Mesh, norm_type: float) -> Tensor:
        return clip_grads(parameters, max_norm, mesh, norm_type)
