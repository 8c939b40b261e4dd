"""Refuses what does not fit before any rank starts. Arithmetic only."""

from collections.abc import Iterable

from plait import PlaitError, Run

KEY = "strategy.context_parallel"
METHODS = ("gather", "ring", "ulysses")
ORDERS = ("zigzag", "contiguous")


KEYWORDS = ("scale", "window", "softcap", "sinks")  # of attention, as docs/model-spec.md declares them


def refuse_keywords(others: Iterable[str], method: str) -> None:
    """Raise PlaitError if there are keywords of attention that `method` cannot serve."""
    for name in others:
        raise PlaitError(
            f"the model calls its attention with the keyword {name!r}, which {KEY}.method={method} does not know; it "
            f"knows {', '.join(KEYWORDS)}"
        ).at(f"{KEY}.method", method)


def stretches(degree: int, order: str) -> int:
    """Into how many equal stretches a sequence is divided; a rank has one, or two in zigzag order."""
    return 2 * degree if order == "zigzag" else degree


def check(run: Run, degree: int, method: str, order: str) -> None:
    """Raise PlaitError for sequences or heads that cannot be divided, and for a model that does not name attention."""
    length = run.config.train.seq_len
    parts = stretches(degree, order)
    if length % parts:
        low = length - length % parts
        fits = tuple(n for n in (low, low + parts) if n)
        raise PlaitError(
            f"train.seq_len={length} cannot be divided into {parts} equal stretches, as {KEY}.degree={degree} with "
            f"{KEY}.order={order} needs; {' and '.join(map(str, fits))} would fit"
        ).at("train.seq_len", length, fits=fits)
    if run.spec.attention is None:
        raise PlaitError(
            "strategy 'context_parallel' needs to know where the model's attention is, but its spec names no "
            "`attention`; leave the strategy out"
        ).at("strategy", "context_parallel")
    if not run.spec.causal:
        raise PlaitError(
            "strategy 'context_parallel' divides causal attention, but in this model tokens see later ones; leave the "
            "strategy out"
        ).at("strategy", "context_parallel")
    heads = run.spec.sizes.get("heads")
    if method == "ulysses" and heads is not None and heads % degree:
        fits = tuple(d for d in range(1, heads + 1) if heads % d == 0)
        raise PlaitError(
            f"{KEY}.degree={degree} does not divide the model's {heads} heads, as {KEY}.method=ulysses needs; degrees "
            f"that fit: {', '.join(map(str, fits))}"
        ).at(f"{KEY}.degree", degree, fits=fits)
