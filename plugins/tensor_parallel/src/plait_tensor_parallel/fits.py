"""What does not fit, said before any rank starts. Arithmetic only."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from plait import PlaitError

if TYPE_CHECKING:
    from plait_tensor_parallel import TensorParallel

SHARDED = ("heads", "kv_heads", "ffn", "vocab")  # the logical axes that are divided
KEY = "strategy.tensor_parallel"


def check(options: "TensorParallel", run: Any) -> None:
    """Raise PlaitError for a degree that does not divide what it must, and for options that cannot be."""
    degree, found = options.degree, units(run)
    for axis, count in found:
        if not fits(axis, count, degree):
            fitting = [d for d in range(1, max(n for _, n in found) + 1) if all(fits(a, n, d) for a, n in found)]
            raise PlaitError(
                f"{KEY}.degree={degree} does not divide the model's {count} {axis}; degrees that fit: "
                f"{', '.join(map(str, fitting))}"
            )
    length = run.config.train.seq_len
    if options.sequence_parallel and length % degree:
        raise PlaitError(
            f"train.seq_len={length} is not divided by {KEY}.degree={degree}, as {KEY}.sequence_parallel=true needs; "
            f"{length - length % degree} and {length - length % degree + degree} would fit"
        )
    if options.async_tp:
        compiling = run.config.compile
        if run.device_type != "cuda" or not compiling.enabled or compiling.backend != "inductor":
            raise PlaitError(
                f"{KEY}.async_tp=true is done by inductor on GPUs: it needs CUDA and compile.enabled=true with "
                f"compile.backend=inductor, not {run.device_type} and compile.enabled={str(compiling.enabled).lower()}"
            )


def degrees(run: Any, world_size: int) -> list[int]:
    """Those that divide the world and all that must be divided."""
    found = units(run)
    return [d for d in range(1, world_size + 1) if world_size % d == 0 and all(fits(a, n, d) for a, n in found)]


def units(run: Any) -> list[tuple[str, int]]:
    """(logical axis, how many units it has) of all dims that are divided, each once."""
    return list(dict.fromkeys(_units(run)))


def _units(run: Any) -> Iterator[tuple[str, int]]:
    for fqn, shape in run.shapes.items():
        for axis, size in zip(run.spec.axes_of(fqn), shape, strict=True):
            if axis in SHARDED:
                yield axis, run.spec.sizes.get(axis, size)


def fits(axis: str, count: int, degree: int) -> bool:
    """Fewer key and value heads than ranks are no obstacle: several ranks then use the same one."""
    return count % degree == 0 or (axis == "kv_heads" and degree % count == 0)
