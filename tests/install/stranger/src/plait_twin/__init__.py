"""Replicas of a model that sum their gradients inside backward, as a stranger to Plait would write them."""

from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import ge

from plait import MeshAxis, hookimpl

if TYPE_CHECKING:
    from torch import nn


@attrs.define
class Twin:
    """`degree` replicas hold the same parameters, and each sees its own share of the batch."""

    phase = "graph"
    claims = ("gradient_sum",)

    degree: int = attrs.field(default=2, validator=ge(1))

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [MeshAxis("twin", self.degree, splits="batch")]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: Any) -> None:
        from plait import transform_param
        from plait_twin.summed import Summed

        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                transform_param(module, name, Summed(mesh.data(param).get_group()))
