"""The products of linear layers in blocks are those of float8 numbers, with a scale for each row.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from typing import TYPE_CHECKING

import attrs

from plait import ModelSpec, PlaitError, hookimpl

if TYPE_CHECKING:
    from torch import nn

    from plait import Mesh


@attrs.define
class Float8:
    """Weights, and `inputs` too, are rounded to e4m3 before they are multiplied; `gather` sends weights as float8."""

    phase = "model"
    numerics = "own"
    distance = 0.2

    inputs: bool = True
    gather: bool = True

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec) -> None:
        from torch import nn

        from plait import mix_in, set_wire_form
        from plait_float8.linear import Rounded, RoundedInputs

        blocks = spec.blocks_of(model).items()
        inside = [pair for fqn, block in blocks for pair in block.named_modules(prefix=fqn)]
        found = {fqn: module for fqn, module in inside if isinstance(module, nn.Linear)}
        if blocks and not found:
            raise PlaitError("float8 finds no nn.Linear in the model's blocks, so it would change nothing").at(
                "strategy", "float8", fits="a model whose blocks have nn.Linear"
            )
        for fqn, linear in found.items():
            set_wire_form(linear, "weight", Rounded(self.gather))
            if self.inputs:
                mix_in(linear, RoundedInputs)
                axis = mesh.sharding_axis(spec.axes_of(f"{fqn}.weight"))
                linear.__dict__["_divided"] = mesh[axis] if axis else None
