"""What a model says about itself, so that strategies need not know it by name."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import attrs

from plait.contract.errors import PlaitError
from plait.contract.packed import Axis, Packed


@attrs.frozen
class ModelSpec:
    """Everything that a strategy may know about a model.

    Patterns are FQNs in which `*` stands for one name (`layers.*.attention.wq.weight`); the first that matches counts.

    axes:      FQN pattern of a parameter -> the logical axis (or None) of each of its dims, in torch's order: a
               `Linear(dim, ffn)` weight is `("ffn", "embed")`, its bias `("ffn",)`; `experts` comes first. A dim that
               holds several parts in turn, as a fused gate does, is `Packed("ffn", 2)`, and parts of unequal
               size are `UnequalParts`. Of a tied parameter, here and in `init`, one name is enough.
    blocks:    patterns of the repeated unit: sharded, compiled and recomputed as one, and divided into stages.
    sizes:     logical axis -> number of its units, if that is not the number of rows (`{"heads": 32}`).
    branches:  patterns of the modules that read the residual stream and return what is added to it.
    writers:   pattern of a branch -> that of another one which writes its result to the stream, with the same names for
               `*`: the first then reads the stream and returns no summand, and a norm of the sum may follow the other.
    attention: pattern of attention's inner function, a module `forward(q, k, v, positions)`: of (B, heads, T, width)
               each, the mean of values weighted by the softmax of the scaled products of queries and keys; a token sees
               those up to itself, of its own document if there are positions. Anything else is a keyword of the call:
               `scale`, `window`, `softcap`, `sinks` (`plait.ops.CausalAttention`).
    mixers:    patterns of the modules that mix the tokens of a row in a way of their own, such as a recurrence, a
               convolution or attention of another form: they need whole rows, so no strategy divides sequences.
    documents: FQN of a module `forward(positions, dtype)`, called once in a forward if there are positions: attention's
               inner functions get what it makes of them, such as a mask, instead of positions. dtype: of queries.
    causal:    whether no token sees a later one. False: the model is an encoder; attention's inner function shows a
               token all of its document, so it trains on data that hide the tokens to predict.
    init:      FQN pattern of a parameter or buffer -> `fn(tensor, generator)` that fills it in place. Parameters are
               filled in fp32, one row of dim 0 at a time (1-D ones whole); the function sees one row, and if it
               has a parameter `row`, the row's index. Buffers are filled whole, in their own dtype.
    flops:     `fn(seq_len)` -> floating point operations per token, forward and backward; None leaves `mfu` empty.
    routers:   patterns of the modules that send tokens to experts and hold the state of their balance.
    row_means: patterns of the modules that compute a mean over a row's tokens, `forward(x (B, T, ...)) -> (B, ...)`,
               whose gradient is not used: if rows are divided, the core completes it.
    elementwise: patterns of 1-D parameters each of whose elements acts on its own unit alone, such as a sink per head
               or a slope per element of a feed-forward: a part of them is right beside a part of the units.
    biases:    patterns of parameters that are added once to a sum over a divided axis, as the bias of a matrix that is
               stored transposed. Beside a matrix with rows for what comes out, as nn.Linear's, none needs a name.
    across:    pattern of a module inside a branch -> the logical axis along the last dim of what it gets and returns,
               of which it combines all units, as a norm over all heads does: if ranks have a share, it must get all.
    head:      FQN of the Linear whose result the model returns, unchanged, as its logits; `loss.chunks` needs it.
    before:    patterns of the modules with parameters that stand before the first block, such as embeddings.
    after:     patterns of those that stand after the last block, such as a norm and the head.

    Each module of `before` and `after` is called as a module, once in every forward, and no other module reads its
    parameters. If several share a parameter (tied weights), all of them are named. So a strategy may gather, free or
    place them apart from the rest of the model. Both are optional: what neither names is the whole model's.
    """

    axes: Mapping[str, tuple[Axis, ...]]
    blocks: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    sizes: Mapping[str, int] = attrs.field(factory=dict)
    branches: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    writers: Mapping[str, str] = attrs.field(factory=dict)
    attention: str | None = None
    mixers: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    documents: str | None = None
    causal: bool = True
    init: Mapping[str, Callable[[Any, Any], Any]] = attrs.field(factory=dict)
    flops: Callable[[int], int] | None = None
    routers: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    row_means: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    elementwise: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    biases: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    across: Mapping[str, str] = attrs.field(factory=dict)
    head: str | None = None
    before: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    after: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])

    def axes_of(self, fqn: str) -> tuple[Axis, ...]:
        """The logical axes of parameter `fqn`. Raises PlaitError if no pattern names it."""
        return lookup(self.axes, fqn, "axes")

    def names_of(self, fqn: str) -> tuple[str | None, ...]:
        """The same by name alone, packed or not; None for `UnequalParts`. Who divides a dim needs `parts_of` too."""
        return tuple(a.axis if isinstance(a, Packed) else a if isinstance(a, str) else None for a in self.axes_of(fqn))

    def parts_of(self, fqn: str) -> tuple[int, ...]:
        """How many times each dim of parameter `fqn` holds all units of its axis: 1, or the parts of `Packed`."""
        return tuple(a.parts if isinstance(a, Packed) else 1 for a in self.axes_of(fqn))

    def units_of(self, fqn: str) -> tuple[int, ...]:
        """How many equal units each dim of parameter `fqn` holds: those of its axis in `sizes`, else 1, for each part
        of `Packed`."""
        return tuple(self.sizes.get(str(n), 1) * p for n, p in zip(self.names_of(fqn), self.parts_of(fqn), strict=True))

    def init_of(self, fqn: str) -> Callable[[Any, Any], Any]:
        """The function that fills parameter or buffer `fqn`. Raises PlaitError if no pattern names it."""
        return lookup(self.init, fqn, "init")

    def blocks_of(self, model: Any) -> dict[str, Any]:
        """FQN -> module of every block of `model`, in order."""
        return named(model, self.blocks)

    def before_of(self, model: Any) -> dict[str, Any]:
        """FQN -> module of everything in `before`, in the order of `model`."""
        return named(model, self.before)

    def after_of(self, model: Any) -> dict[str, Any]:
        """FQN -> module of everything in `after`, in the order of `model`."""
        return named(model, self.after)

    def branches_of(self, model: Any) -> dict[str, Any]:
        """FQN -> module of every branch of `model`, in order."""
        return named(model, self.branches)

    def attention_of(self, model: Any) -> dict[str, Any]:
        """FQN -> module of every inner function of attention, in order."""
        return named(model, (self.attention,) if self.attention else ())

    def row_means_of(self, model: Any) -> dict[str, Any]:
        """FQN -> module of every mean over a row's tokens, in order."""
        return named(model, self.row_means)

    def branch_of(self, fqn: str) -> str | None:
        """The branch that contains, or is, the module `fqn`."""
        outer = (fqn[:end] for end, letter in enumerate(f"{fqn}.") if letter == ".")
        return next((f for f in outer if any(matches(b, f) for b in self.branches)), None)

    def is_elementwise(self, fqn: str) -> bool:
        """Whether each element of parameter `fqn` acts on its own unit alone."""
        return any(matches(pattern, fqn) for pattern in self.elementwise)

    def routers_of(self, model: Any) -> dict[str, Any]:
        """FQN -> module of every router of `model`, in order."""
        return named(model, self.routers)


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(r"[^.]+".join(re.escape(piece) for piece in pattern.split("*")))


def matches(pattern: str, fqn: str) -> bool:
    """Whether `fqn` is one of those that a pattern of a spec means, in which `*` stands for one name."""
    return _regex(pattern).fullmatch(fqn) is not None


def named(model: Any, patterns: tuple[str, ...]) -> dict[str, Any]:
    """FQN -> module, of all modules that a pattern matches, without those of other stages (`plait.parallel.stages`)."""
    there = {fqn: module for fqn, module in model.named_modules() if not getattr(module, "absent", False)}
    return {fqn: module for fqn, module in there.items() if any(matches(p, fqn) for p in patterns)}


def find(table: Mapping[str, Any], fqn: str) -> Any:
    """The value of the first pattern in `table` that matches; None if none does. `lookup` raises instead."""
    return next((value for pattern, value in table.items() if matches(pattern, fqn)), None)


def lookup(table: Mapping[str, Any], fqn: str, field: str) -> Any:
    """The value of the first pattern in `table` that matches. Raises PlaitError, naming `field`, if none does."""
    if (value := find(table, fqn)) is not None:
        return value
    raise PlaitError(
        f"the model's spec says nothing about {fqn!r}: no pattern in `{field}` matches it (there are {list(table)})"
    )
