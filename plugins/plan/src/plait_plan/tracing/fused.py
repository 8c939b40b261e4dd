"""What a compiler saves: consecutive operators of a block become one kernel, which reads and writes memory once.

The rule is inductor's: operators on single elements, and sums over them, become one kernel with their neighbours.
Products of matrices, attention and collectives stay apart, and each block, and the loss, is compiled by itself. A
kernel reads each of its inputs once, and writes what is used after it.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from plait_plan.tracing.blocks import block_of
from plait_plan.tracing.recorder import Operator, Recorder, Storage, Touched
from plait_plan.tracing.traffic import SPACES

Change = tuple[int, Storage, int]  # of a recorder
LOSS = "the loss"  # where its operators are, instead of a module
ENDS = ("aten::scatter_add",)  # adds to what its kernel has written to memory, from where the next kernel reads it


def fuse(recorder: Recorder, places: Mapping[str, Any], graphs: bool) -> list[Operator]:
    """The recorded operators with the bytes of compiled blocks: all of a kernel's are those of its first operator.

    graphs: whether the operators are those of a compiler's graphs. What a kernel makes for itself alone is then in
    registers: the recorder forgets that memory was used for it.
    """
    operators, touched = recorder.operators, recorder.touched
    last: dict[Storage, int] = {}  # the operator that uses a storage last
    for number, one in enumerate(touched):
        for storage in (*one.reads, *one.writes):
            last[storage] = number
    found = list(operators)
    inside: set[Storage] = set()
    kernels: list[range] = []
    start = 0
    while start < len(operators):
        end = start
        where = _where(operators[start], touched[start], places)
        if where is not None:
            while end < len(operators) and _continues(operators[end], touched[end], places, where):
                end += 1
                if operators[end - 1].name in ENDS:
                    break
            kernels.append(range(start, end))
            inside |= _join(found, touched, kernels[-1], last)
        start = max(end, start + 1)
    if graphs:
        inside -= set(recorder.before)
        recorder.changes = _at_kernels([change for change in recorder.changes if change[1] not in inside], kernels)
    return found


def _at_kernels(changes: list[Change], kernels: list[range]) -> list[Change]:
    """A kernel's results are there before it begins, and what it reads until it has ended."""
    moved, coming = [], iter(kernels)
    kernel = next(coming, range(0))
    for number, storage, more in changes:
        while kernel.stop and kernel.stop <= number:
            kernel = next(coming, range(0))
        if number in kernel:
            number = kernel.start if more > 0 else kernel.stop
        moved.append((number, storage, more))
    return sorted(moved, key=lambda change: change[0])


def _where(operator: Operator, touched: Touched, places: Mapping[str, Any]) -> Any:
    if not touched.fuses or not operator.bytes:
        return None
    unit = LOSS if operator.module == LOSS else block_of(operator.module, places)
    return None if unit is None else (unit, operator.phase, operator.micro)


def _continues(operator: Operator, touched: Touched, places: Mapping[str, Any], where: Any) -> bool:
    """Whether a kernel continues after the operator: one that moves no data, such as a view, does not end it."""
    if operator.name.partition("::")[0] in SPACES:
        return False
    return not operator.bytes or _where(operator, touched, places) == where


def _join(found: list[Operator], touched: list[Touched], kernel: range, last: dict[Storage, int]) -> set[Storage]:
    """Give all bytes of the kernel to its first operator; returns what it makes and nobody else reads."""
    made: set[Storage] = set()
    reads: dict[Storage, int] = {}
    writes: dict[Storage, int] = {}
    for number in kernel:
        for storage, size in touched[number].reads.items():
            if storage not in made:
                reads[storage] = max(size, reads.get(storage, 0))
        for storage, size in touched[number].writes.items():
            made.add(storage)
            if last[storage] >= kernel.stop:
                writes[storage] = max(size, writes.get(storage, 0))
    flops, opens = sum(found[number].flops for number in kernel), any(found[number].opens for number in kernel)
    size = sum(reads.values()) + sum(writes.values())
    for number in kernel:
        if found[number].bytes:
            found[number] = attrs.evolve(found[number], bytes=size, flops=flops, opens=opens)
            size, flops, opens = 0, 0, False
    return {storage for storage in made if last[storage] < kernel.stop}
