"""Refuses what does not fit before any rank starts. Arithmetic only."""

from collections.abc import Iterator

from plait import ModelSpec, Packed, PlaitError, Run, UnequalParts, divisors, matches

SHARDED = ("heads", "kv_heads", "mixer_heads", "ffn", "vocab")  # the logical axes that are divided
KEY = "strategy.tensor_parallel"
Axes = tuple[str | None, ...]


def check(run: Run, degree: int, sequence_parallel: bool, async_tp: bool) -> None:
    """Raise PlaitError for a degree that does not divide what it must, and for impossible options."""
    divided = units(run)
    for axis, count in divided:
        if not divides(axis, count, degree):
            fitting = [d for d in range(1, max(n for _, n in divided) + 1) if all(divides(a, n, d) for a, n in divided)]
            raise PlaitError(
                f"{KEY}.degree={degree} does not divide the model's {count} {axis}; degrees that fit: "
                f"{', '.join(map(str, fitting))}"
            ).at(f"{KEY}.degree", degree, fits=fitting)
    length = run.config.train.seq_len
    if sequence_parallel and length % degree:
        raise PlaitError(
            f"train.seq_len={length} is not divisible by {KEY}.degree={degree}, as {KEY}.sequence_parallel=true needs; "
            f"{length - length % degree} and {length - length % degree + degree} would fit"
        ).at("train.seq_len", length, fits=(length - length % degree, length - length % degree + degree))
    outside = next(_mix_outside(run), None)
    if sequence_parallel and outside is not None:
        raise PlaitError(
            f"{outside!r} of the model mixes tokens in no branch of its spec: with {KEY}.sequence_parallel=true a "
            "rank would see its share of a row there; false gives each rank all tokens"
        ).at(f"{KEY}.sequence_parallel", True, fits=(False,))
    if async_tp:
        compiling = run.config.compile
        if run.device_type != "cuda" or not compiling.enabled or compiling.backend != "inductor":
            raise PlaitError(
                f"{KEY}.async_tp=true is done by inductor on GPUs: it needs CUDA and compile.enabled=true with "
                f"compile.backend=inductor, not {run.device_type} and compile.enabled={str(compiling.enabled).lower()}"
            ).at(f"{KEY}.async_tp", True, fits=(False,))


def degrees(run: Run, world_size: int) -> list[int]:
    """The degrees that divide the world and everything that must be divided."""
    divided = units(run)
    return [d for d in divisors(world_size) if all(divides(a, n, d) for a, n in divided)]


def _mix_outside(run: Run) -> Iterator[str]:
    """The patterns of what mixes tokens in no branch, and without a divided matrix that gets the whole rows for it."""
    spec, inner = run.spec, run.spec.attention
    around = {pattern: pattern for pattern in spec.mixers} | ({inner: inner.rpartition(".")[0]} if inner else {})
    heads = [fqn for fqn in run.shapes if "heads" in names_of(spec, fqn)]
    for pattern, of in around.items():
        divided = any(matches(of, fqn[:end]) for fqn in heads for end, letter in enumerate(fqn) if letter == ".")
        if spec.branch_of(pattern) is None and not divided:
            yield pattern


def names_of(spec: ModelSpec, fqn: str) -> Axes:
    """The names of the axes of parameter `fqn`: of parts of unequal size that of the first part that has one."""
    both = zip(spec.axes_of(fqn), spec.names_of(fqn), strict=True)
    of_parts = (a.parts if isinstance(a, UnequalParts) else ((name, 0),) for a, name in both)
    return tuple(next((name for name, _ in parts if name), None) for parts in of_parts)


def units(run: Run) -> list[tuple[str, int]]:
    """(logical axis, number of its units) of all dims that are divided, each once."""
    return list(dict.fromkeys(_units(run)))


def _units(run: Run) -> Iterator[tuple[str, int]]:
    sizes = run.spec.sizes
    for fqn, shape in run.shapes.items():
        for axis, parts, size in zip(run.spec.axes_of(fqn), run.spec.parts_of(fqn), shape, strict=True):
            if isinstance(axis, UnequalParts):
                yield from ((name, sizes[name]) for name, _ in axis.parts if name in SHARDED)
            elif (name := axis.axis if isinstance(axis, Packed) else axis) in SHARDED:
                yield name, sizes.get(name, size // parts)


def divides(axis: str, count: int, degree: int) -> bool:
    """Fewer key and value heads than ranks are allowed: several ranks then use the same one."""
    return count % degree == 0 or (axis == "kv_heads" and degree % count == 0)
