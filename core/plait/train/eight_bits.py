"""A tensor in 8 bits per element and a scale per row, the same in every layout.

An element is coded as a small float: 8 steps per power of two, and steps of one size below the smallest power. The
scale of a row is the power of two that no element exceeds, so most of what a step did not change keeps its code.

Shapes: R any dims, C the last one, which a row is along.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from plait.system.torch_internals.dtensors import split_of

DROPPED = 20  # of float32's 23 digits: 3 are kept, so there are 8 steps per power of two
DIGITS = (1 << DROPPED) - 1
# What is added to a share of the scale before its digits are dropped: below it all steps have one size. Rows without a
# negative element need no sign, so they reach further down.
SIGNED, POSITIVE = 2.0**-15, 2.0**-30
SIGN = 0x80


def encoded(value_RC: Tensor, random_RC: Tensor, sharing: Iterable["dist.ProcessGroup"] = ()) -> tuple[Tensor, Tensor]:
    """(codes (R, C) as uint8, scales (R, 1) as float32) of what this rank holds.

    An element becomes one of its two neighbours, the nearer one more often, so that its mean is right. But where no
    element of a row is negative, as of a second moment, none above 0 becomes 0: a step divides by it.

    random_RC: random digits of each element, at least 20 bits. sharing: groups of ranks that hold other parts of the
    same rows. The scale of a row without negative elements is positive, that of another negative, that of a row with
    elements that are not finite infinite.
    """
    wide_RC = value_RC.float()
    ends_R2 = wide_RC.new_zeros((*wide_RC.shape[:-1], 2))  # the largest size, the largest negative size
    if wide_RC.shape[-1]:
        ends_R2 = torch.stack([wide_RC.abs().amax(-1), wide_RC.neg().amax(-1)], -1).nan_to_num(torch.inf, torch.inf)
    for group in sharing:
        dist.all_reduce(ends_R2, dist.ReduceOp.MAX, group=group)
    most_R1, negative_R1 = ends_R2[..., :1], ends_R2[..., 1:] > 0
    size_R1 = (most_R1.contiguous().view(torch.int32) + 0x7FFFFF >> 23 << 23).view(torch.float32)
    share_RC = torch.where(size_R1 > 0, wide_RC.abs() / size_R1, 0.0).nan_to_num(0.0)
    least_R1 = torch.where(negative_R1, SIGNED, POSITIVE)
    bits_RC = (share_RC + least_R1).view(torch.int32) + (random_RC & DIGITS).int()
    codes_RC = (bits_RC >> DROPPED) - (least_R1.view(torch.int32) >> DROPPED)
    codes_RC = torch.where(~negative_R1 & (share_RC > 0), codes_RC.clamp(min=1), codes_RC)
    codes_RC = torch.where(wide_RC < 0, codes_RC | SIGN, codes_RC)
    return codes_RC.to(torch.uint8), torch.where(negative_R1, -size_R1, size_R1)


def decoded(codes_RC: Tensor, scales_R1: Tensor) -> Tensor:
    """The float32 values of what `encoded` returned."""
    negative_R1 = scales_R1 < 0
    least_R1 = torch.where(negative_R1, SIGNED, POSITIVE)
    codes_RC = codes_RC.int()
    minus_RC = negative_R1 & (codes_RC >= SIGN)
    codes_RC = torch.where(minus_RC, codes_RC - SIGN, codes_RC)
    share_RC = (codes_RC + (least_R1.view(torch.int32) >> DROPPED) << DROPPED).view(torch.float32) - least_R1
    return torch.where(minus_RC, -share_RC, share_RC) * scales_R1.abs()


def rows_shared(value: Tensor) -> list["dist.ProcessGroup"]:
    """The groups of ranks, one per axis that divides the last dim of `value`, that hold parts of the same rows."""
    if not isinstance(value, DTensor):
        return []
    mesh = value.device_mesh
    return [mesh.get_group(axis) for axis, each in enumerate(value.placements) if _divides_rows(value, each)]


def scales_as(value: DTensor, scales_R1: Tensor) -> DTensor:
    """`scales_R1` of what this rank holds of `value`, as those of all: ranks with parts of one row hold the same."""
    lies = [Replicate() if _divides_rows(value, each) else each for each in value.placements]
    whole = torch.empty((*value.shape[:-1], 1), device="meta")
    more = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    made: DTensor = DTensor.from_local(scales_R1, value.device_mesh, lies, **more)  # type: ignore[arg-type]
    return made


def _divides_rows(value: DTensor, placement: object) -> bool:
    return split_of(placement)[0] == value.dim() - 1
