"""What an optimizer keeps in bfloat16 or 8 bits: rounded stochastically, by the same random digits in every layout."""

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
from plait.train.eight_bits import decoded, encoded, rows_shared, scales_as

PIECE = 2**24  # elements of parameters that are wide at once
LOW = torch.bfloat16
MASK = 2**32 - 1
FACTOR = 0x45D9F3B  # of a multiplicative hash of 32 bits
CODES, SCALES = "_8bit", "_8bit_scale"  # what stands in place of a state in 8 bits: its name and these


@attrs.define(eq=False)
class Rounding:
    """How an optimizer's step rounds what it keeps. A value becomes one of its two neighbours, the nearer one more
    often, so that steps far below its last digit add up.

    states: in what the states of all parameters are kept, "bfloat16" or "8bit" (of those of one dim nothing is in 8
    bits); None: in the dtype in which the optimizer makes them.
    parameters: whether parameters that are stored in bfloat16 are rounded so, with their states.
    seed: of the run.
    step: how many the run has made; whoever steps the optimizer counts it.

    The random digits are a function of seed, step, name and global index. So layouts with equal gradients keep equal
    bits, and so does a resumed run.
    """

    states: str | None
    parameters: bool
    seed: int
    step: int = 0
    _held: dict[str, list[Tensor]] = attrs.field(init=False, factory=dict)  # global indices along each dim

    @classmethod
    def of(cls, precision: Precision, seed: int) -> "Rounding | None":
        """That of a run; None: nothing is rounded."""
        parameters = precision.rounding == "stochastic"
        return cls(precision.optimizer, parameters, seed) if precision.optimizer or parameters else None

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
        """What is stepped in place of `param`, with its states: itself, unless it is stored in bfloat16."""
        state, stepped = optimizer.state.pop(param, {}), param
        if param.dtype == LOW:
            stepped = nn.Parameter(param.detach().float())
            stepped.grad = None if param.grad is None else param.grad.float()
        wide = torch.promote_types(stepped.dtype, torch.float32)
        for key in [key for key in state if key.endswith(CODES)]:
            name = key.removesuffix(CODES)
            state[name] = _from_codes(state.pop(key), state.pop(name + SCALES), wide)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype == LOW and value.shape == param.shape:
                state[key] = value.to(wide)
        if state:
            optimizer.state[stepped] = state
        return stepped

    def _narrow(self, optimizer: Any, param: nn.Parameter, stepped: nn.Parameter, name: str) -> None:
        state = optimizer.state.pop(stepped, {})
        if stepped is not param:
            end = stepped.detach()
            param.detach().copy_(self._rounded(end, name, "") if self.parameters else end)  # a copy is the nearest
        coded, low = self.states == "8bit" and param.dim() > 1, self.states == "bfloat16" or stepped is not param
        for key, value in list(state.items()):
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != param.shape:
                continue
            if coded:
                state[key + CODES], state[key + SCALES] = self._in_codes(state.pop(key), name, key)
            elif low:
                state[key] = self._rounded(value, name, key)
        if state:
            optimizer.state[param] = state

    def _rounded(self, value: Tensor, name: str, key: str) -> Tensor:
        """`value` in bfloat16."""
        return _lying_as(value, stochastic(local(value), self._digits(value, name, key)))

    def _in_codes(self, value: Tensor, name: str, key: str) -> tuple[Tensor, Tensor]:
        """(codes, scales) of `value` in 8 bits."""
        codes, scales = encoded(local(value), self._digits(value, name, key), rows_shared(value))
        return _lying_as(value, codes), scales_as(value, scales) if isinstance(value, DTensor) else scales

    def _digits(self, value: Tensor, name: str, key: str) -> Tensor:
        """The random digits of what this rank holds of `value`."""
        if name not in self._held:
            self._held[name] = [held_indices(value, dim).to(local(value).device) for dim in range(value.dim())]
        return random_digits(self._held[name], f"{self.seed}/{self.step}/{name}/{key}")


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


def local(value: Tensor) -> Tensor:
    """What this rank holds of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def _lying_as(value: Tensor, own: Tensor) -> Tensor:
    """`own` of this rank as a tensor that lies as `value` does."""
    if not isinstance(value, DTensor):
        return own
    lies: Any = {"shape": value.shape, "stride": value.stride(), "run_check": False}
    return DTensor.from_local(own, value.device_mesh, value.placements, **lies)


def _from_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _lying_as(codes, decoded(local(codes), local(scales)).to(dtype))


def random_digits(indices: list[Tensor], key: str) -> Tensor:
    """32 random bits of each element of a part of a tensor, as int64.

    indices: where it lies in the whole tensor, along each dim. key: of the digits.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=4 * (len(indices) + 1)).digest()
    words = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(len(indices) + 1)]
    mixed = torch.full((1,) * len(indices), words[0], dtype=torch.int64, device=indices[0].device)
    for dim, (index, word) in enumerate(zip(indices, words[1:], strict=True)):
        along = (index * (word | 1) & MASK).view([-1 if d == dim else 1 for d in range(len(indices))])
        mixed = _hashed(mixed + along)
    return mixed


def stochastic(value: Tensor, random: Tensor) -> Tensor:
    """`value` in bfloat16: each element up or down with the odds that make its mean right.

    random: digits of each element, at least 16 bits.
    """
    wide = value.float()
    bits = (wide.view(torch.int32) + (random & 0xFFFF).int()) & -0x10000  # the digits that bfloat16 has
    return torch.where(wide.isfinite(), bits.view(torch.float32), wide).to(LOW)


def _hashed(x: Tensor) -> Tensor:
    for _ in range(2):
        x = ((x >> 16 ^ x) * FACTOR) & MASK
    return x >> 16 ^ x
