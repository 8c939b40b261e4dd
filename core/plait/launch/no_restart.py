"""Faults that every start of a run would meet again: how they are told, what to change, and the exit code of each."""

import re
from collections.abc import Iterable

from plait.contract.errors import PlaitError
from plait.system.errors import one_line, visible
from plait.system.torch_internals.compiler import COMPILER_PACKAGES

EXIT_CODES = {"memory": 4, "device": 5, "compiler": 6}  # of the command
ADVICE = {
    "memory": "use a smaller train.local_batch_size, remat.mode=full, loss.chunks=8, precision.param=bfloat16, or more "
    "ranks per parameter",
    "device": "a kernel met an index outside of its tensor, such as a token id that is not below model.vocab_size; "
    "CUDA_LAUNCH_BLOCKING=1 shows where",
    "compiler": "compile.enabled=false trains without the compiler, and compile.backend=aot_eager without inductor",
}
MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|ALLOC_FAILED", re.I)
ASSERT = re.compile(r"device-side assert", re.I)


class RunFailed(PlaitError):
    """A run whose ranks failed, by a fault of `EXIT_CODES` or otherwise."""

    def __init__(self, sentence: str, fault: str | None = None) -> None:
        super().__init__(sentence)
        self.exit_code = EXIT_CODES.get(fault or "", 1)


def fault_of(errors: Iterable[BaseException]) -> tuple[str, BaseException] | None:
    """(fault, the error that shows it) of an error and its causes; None if it is none of these faults.

    A fault is never a lost rank, whatever words its message has: a compiler's quotes whole programs.
    """
    shown_by = {fault: error for error in errors if (fault := _fault(error))}
    return next(((fault, shown_by[fault]) for fault in EXIT_CODES if fault in shown_by), None)


def _fault(error: BaseException) -> str | None:
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error) if isinstance(error, RuntimeError) else ""
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names or MEMORY.search(text):
        return "memory"
    if ASSERT.search(text):
        return "device"
    return "compiler" if type(error).__module__.startswith(COMPILER_PACKAGES) else None


def sentence(fault: str, error: BaseException) -> str:
    """What happened, in the error's first line, and what to change."""
    first = next(iter(str(error).strip().splitlines()), "")
    kind = type(error).__name__
    what = (
        one_line(error).partition(" GPU ")[0] if fault == "memory" else visible(f"{kind}: {first}" if first else kind)
    )
    return f"{what}: {ADVICE[fault]}"
