"""Context parallelism for any model: each rank has a part of every sequence, and attention sees all of it.

Sources: Grattafiori et al. (keys and values gathered), arXiv 2407.21783, section 3.3.2; Liu et al., "Ring Attention",
arXiv 2310.01889; Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509; zigzag: Zhu, "ring-flash-attention".
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge, in_

from plait import MeshAxis, ModelSpec, PlaitError, Run, hookimpl
from plait_context_parallel.dealt import DealtTokens
from plait_context_parallel.fits import METHODS, ORDERS, check

if TYPE_CHECKING:
    from torch import Tensor, nn

    from plait import Mesh


@attrs.define(slots=False)
class ContextParallel:
    """Sequences are divided over `degree` ranks, which hold the same parameters.

    `conf/strategy/context_parallel.yaml` explains the options.
    """

    phase = "model"
    claims = ("sequence",)
    trial = {"degree": 2}  # noqa: RUF012 - its options in the tests of others

    degree: int = attrs.field(default=2, validator=ge(1))
    method: str = attrs.field(default="gather", validator=in_(METHODS))
    order: str = attrs.field(default="zigzag", validator=in_(ORDERS))

    def __attrs_post_init__(self) -> None:
        self.dealt = DealtTokens()

    @hookimpl
    def build_mesh(self, run: Run) -> list[MeshAxis]:
        check(run, self.degree, self.method, self.order)
        return [MeshAxis("cp", self.degree, splits="sequence")]

    @hookimpl
    def deal(
        self, tokens: "Tensor", labels: "Tensor", positions: "Tensor | None", mesh: "Mesh"
    ) -> "tuple[Tensor, Tensor, Tensor] | None":
        if self.degree == 1:
            return None
        import torch

        from plait_context_parallel.order import Order

        order = Order.on(mesh["cp"], self.order)
        self.dealt.count, self.dealt.documents = tokens.shape[1] // order.ranks, positions is not None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return order.own(tokens), order.own(labels), order.own(positions)

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec, run: Run) -> None:
        import torch.distributed as dist

        from plait_context_parallel import fused
        from plait_context_parallel.divide import divide

        if self.degree == 1:
            return
        why = fused.trouble(mesh.device_type) if self.method == "ring" else ""
        if why and dist.get_rank() == 0:
            print(f"context_parallel: method=ring keeps scores, without torch's fused kernel: {why}", flush=True)
        divide(model, mesh["cp"], spec, self.dealt, self.method, self.order, not why)


__all__ = ["ContextParallel", "PlaitError"]
