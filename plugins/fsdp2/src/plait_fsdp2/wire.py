"""Parameters with a wire form: FSDP2 gathers what the form sends, and modules compute with what it makes of that."""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from plait import WireForm, take_wire_form
from plait_fsdp2.torch_internals import extend, overwrite, place_of, sharded_params

Place = tuple[nn.Module, str]  # a module, and the name of its parameter


@attrs.frozen(eq=False)
class Traveller:
    """A parameter that travels in a form. inner: what makes a DTensor of its gathered part, if another strategy divides
    it."""

    form: WireForm
    inner: Mapping[str, Any] | None

    @classmethod
    def all_in(cls, model: nn.Module) -> dict[Place, "Traveller"]:
        """Those of `model`, before it is sharded."""
        found: dict[Place, Traveller] = {}
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                if (form := take_wire_form(module, name)) is not None:
                    found[module, name] = cls(form, _inner(param))
        return found


def _inner(param: Any) -> Mapping[str, Any] | None:
    if not isinstance(param, DTensor):
        return None
    mesh, shape, stride = param.device_mesh, param.shape, param.stride()
    return {"device_mesh": mesh, "placements": param.placements, "shape": shape, "stride": stride, "run_check": False}


def send_in_form(model: nn.Module, travellers: Mapping[Place, Traveller]) -> None:
    """Let FSDP2, which shards `model`, gather these parameters in their forms."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for param in sharded_params(module):
                if (traveller := travellers.get(place_of(param))) is not None:
                    extend(param, Gathering(param, traveller))


class Gathering:
    """What FSDP2 asks about one parameter instead of its local tensor; see "FSDP tensors" in torch's sources."""

    def __init__(self, param: Any, traveller: Traveller) -> None:
        self.param, self.traveller = param, traveller
        self.values: Tensor | None = None  # what modules compute with; FSDP2 frees and allocates its memory

    def size(self) -> torch.Size:
        return self.param.padded_sharded_param_size

    def to(self, device: torch.device, **_: Any) -> "Gathering":
        return self

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh: Any, shape: torch.Size, stride: Any, module: Any, policy: Any) -> Any:
        """shape: of the part of the parameter that the ranks gather."""
        stored = self.param.sharded_param.detach().to(self.param.device)  # it may be stored elsewhere
        sent, kept = self.traveller.form.to_wire(stored, policy.param_dtype or stored.dtype)
        missing = self.size()[0] - sent.shape[0]  # other dims are divided evenly
        padded = F.pad(sent, (0, 0) * (sent.dim() - 1) + (0, missing)) if missing else sent
        return (padded,), (shape, kept)

    @torch.no_grad()
    def fsdp_post_all_gather(self, sent: Any, known: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        shape, kept = known
        gathered = sent[0].view(-1)[: math.prod(shape)].view(shape)
        inner = self.traveller.inner
        values = self.traveller.form.from_wire(
            gathered if inner is None else DTensor.from_local(gathered, **inner), kept, dtype
        )
        if first := self.values is None:
            self.values = values.clone(memory_format=torch.contiguous_format)  # it may be a view of what was sent
        else:
            overwrite(self.values, values)
        sent[0].untyped_storage().resize_(0)  # FSDP2 allocates it before it gathers again
        return (self.values, (self.values,)) if first else None
