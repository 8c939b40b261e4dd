"""Completes the means over a row's tokens that a spec names, if axes divide sequences."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.contract.model_spec import ModelSpec
from plait.parallel.mix_in import mix_in
from plait.system.torch_internals.collectives import reduced

if TYPE_CHECKING:
    from plait.parallel.mesh import Mesh


def complete_row_means(model: nn.Module, spec: ModelSpec, mesh: "Mesh") -> None:
    """Change `model` in place: the modules in `spec.row_means` return the mean over the tokens of all ranks."""
    axes = [mesh[axis.name] for axis in mesh.layout.dense if axis.splits == "sequence" and axis.degree > 1]
    for module in spec.row_means_of(model).values():
        mix_in(module, WholeMean)
        module.__dict__["_axes"] = axes


class WholeMean:
    """Mixed into the class of a module that computes a mean over a rank's tokens, of which ranks may have unequally
    many."""

    _axes: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        plain: Any = super()
        mean, tokens = plain.forward(x).detach(), x.shape[1]
        sums = torch.cat([(mean * tokens).flatten(), mean.new_full((1,), tokens)])
        for axis in self._axes:
            sums = reduced(sums, "sum", axis)
        return (sums[:-1] / sums[-1]).view_as(mean)
