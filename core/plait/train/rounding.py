"""What an optimizer keeps in bfloat16: rounded stochastically, by the same random digits in every layout."""

import hashlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.contract.config import Precision
from plait.parallel.group import ParamGroup, part_of
from plait.parallel.initialize import held_indices

PIECE = 2**24  # elements of parameters that are wide at once
LOW = torch.bfloat16
MASK = 2**32 - 1
FACTOR = 0x45D9F3B  # of a multiplicative hash of 32 bits


@attrs.define(eq=False)
class Rounding:
    """How an optimizer's step rounds to bfloat16. A value becomes one of its two neighbours, the nearer one more often,
    so that steps far below its last digit add up.

    states: whether the states of all parameters are kept in bfloat16.
    parameters: whether parameters that are stored in bfloat16 are rounded so, with their states.
    seed: of the run.
    step: how many the run has made; whoever steps the optimizer counts it.

    The random digits are a function of seed, step, name and global index. So layouts with equal gradients keep equal
    bits, and so does a resumed run.
    """

    states: bool
    parameters: bool
    seed: int
    step: int = 0
    _held: dict[str, list[Tensor]] = attrs.field(init=False, factory=dict)  # global indices along each dim

    @classmethod
    def of(cls, precision: Precision, seed: int) -> "Rounding | None":
        """That of a run; None: nothing is rounded."""
        states, parameters = precision.optimizer == "bfloat16", precision.rounding == "stochastic"
        return cls(states, parameters, seed) if states or parameters else None

    def attach(self, optimizer: Any) -> None:
        """From now on every step of `optimizer`, whose groups have names, computes in float32 and rounds what it keeps.

        It steps some parameters at a time: only their states are wide.
        """
        kind = type(optimizer)
        hooked: Any = kind.step
        plain = hooked.__wrapped__ if getattr(hooked, "hooked", False) else hooked  # hooks run once, around all pieces

        def step(own: Any, closure: Any = None) -> None:
            groups = own.param_groups
            try:
                for piece in _pieces(groups):
                    wide = [self._widen(own, param) for param in piece["params"]]
                    own.param_groups = [{**piece, "params": wide}]
                    plain(own)
                    for param, stepped, name in zip(piece["params"], wide, piece["names"], strict=True):
                        self._narrow(own, param, stepped, name)
            finally:
                own.param_groups = groups

        made: Any = type(
            kind.__name__, (kind,), {"step": torch.no_grad()(torch.optim.Optimizer.profile_hook_step(step))}
        )
        made.step.hooked = True
        optimizer.__class__ = made

    def _widen(self, optimizer: Any, param: nn.Parameter) -> nn.Parameter:
        """What is stepped in place of `param`, with its states: itself, unless its values are rounded."""
        state, stepped = optimizer.state.pop(param, {}), param
        if self.parameters and param.dtype == LOW:
            stepped = nn.Parameter(param.detach().float())
            stepped.grad = None if param.grad is None else param.grad.float()
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype == LOW and value.shape == param.shape:
                state[key] = value.to(torch.promote_types(stepped.dtype, torch.float32))
        if state:
            optimizer.state[stepped] = state
        return stepped

    def _narrow(self, optimizer: Any, param: nn.Parameter, stepped: nn.Parameter, name: str) -> None:
        state = optimizer.state.pop(stepped, {})
        if stepped is not param:
            param.detach().copy_(self._rounded(stepped.detach(), name, ""))
        for key, value in state.items():
            low = self.states or stepped is not param
            if low and isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape:
                state[key] = self._rounded(value, name, key)
        if state:
            optimizer.state[param] = state

    def _rounded(self, value: Tensor, name: str, key: str) -> Tensor:
        """`value` in bfloat16."""
        own = value.to_local() if isinstance(value, DTensor) else value
        if name not in self._held:
            self._held[name] = [held_indices(value, dim).to(own.device) for dim in range(value.dim())]
        low = stochastic(own, self._held[name], f"{self.seed}/{self.step}/{name}/{key}")
        if not isinstance(value, DTensor):
            return low
        lies: Any = {"shape": value.shape, "stride": value.stride(), "run_check": False}
        return DTensor.from_local(low, value.device_mesh, value.placements, **lies)


def _pieces(groups: list[ParamGroup]) -> Iterator[ParamGroup]:
    """The groups in parts of PIECE elements each, or of one parameter: the same parts on all ranks."""
    for group in groups:
        part: list[int] = []
        for i, param in enumerate(group["params"]):
            if part and sum(group["params"][j].numel() for j in part) + param.numel() > PIECE:
                yield part_of(group, part)
                part = []
            part.append(i)
        if part:
            yield part_of(group, part)


def stochastic(value: Tensor, indices: list[Tensor], key: str) -> Tensor:
    """`value`, a part of a tensor, in bfloat16: each element up or down with the odds that make its mean right.

    indices: where it lies in the whole tensor, along each dim. key: of the random digits.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=4 * (len(indices) + 1)).digest()
    words = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(len(indices) + 1)]
    mixed = torch.full((1,) * value.dim(), words[0], dtype=torch.int64, device=value.device)
    for dim, (index, word) in enumerate(zip(indices, words[1:], strict=True)):
        along = (index * (word | 1) & MASK).view([-1 if d == dim else 1 for d in range(value.dim())])
        mixed = _hashed(mixed + along)
    wide = value.float()
    bits = (wide.view(torch.int32) + (mixed & 0xFFFF).int()) & -0x10000  # the digits that bfloat16 has
    return torch.where(wide.isfinite(), bits.view(torch.float32), wide).to(LOW)


def _hashed(x: Tensor) -> Tensor:
    for _ in range(2):
        x = ((x >> 16 ^ x) * FACTOR) & MASK
    return x >> 16 ^ x
