"""What is known about a family, once it was tried."""

import re

import attrs

from plait_transformers.counts import Counts
from plait_transformers.supposed import Axis


@attrs.frozen
class ModelFacts:
    """About a family; FQNs are patterns, in which `*` is the number of a block.

    how:       the name of the attention function, in transformers' registry, with which it is built.
    masked:    the family's own function gets masks from Plait.
    whole_rows: blocks get what the family makes of the tokens that it sees of a row, such as its own masks.
    as_in_training: it changes its weights in evaluation, so it computes there what it does in training.
    why_no_documents: why packed documents would see each other; empty, if they do not.
    blocks:    the blocks. branches: modules that read the stream and return a summand of it.
    mixers:    modules that mix tokens in a way of their own. lent: (module, another whose parameters it reads).
    roles:     parameter -> its logical axes. whole: branch -> why it is not divided.
    across, elementwise, biases: as in a spec. spans: a matrix that writes to the stream -> the module that
               reads the stream for it, if one does, and what is divided between the two.
    counted: modules that count heads by attributes of their own.
    widths:    parameter -> its rows, or columns, for each head that they are divided by; layers may differ in them.
    queries:   parameter whose rows are those of groups, each its queries, its key and its value -> the rows of a query.
    attention: the inner attention, if all layers have the same. head_width: of queries.
    first, last: modules with parameters before and after the blocks. head: whose result is the logits, unchanged.
    """

    how: str
    masked: bool
    why_no_documents: str
    blocks: str
    branches: tuple[str, ...]
    mixers: tuple[str, ...]
    lent: tuple[tuple[str, str], ...]
    roles: dict[str, tuple[Axis, ...]]
    whole: dict[str, str]
    across: dict[str, str]
    elementwise: tuple[str, ...]
    counted: Counts
    widths: dict[str, frozenset[int]]
    attention: str | None
    head_width: int
    first: tuple[str, ...]
    last: tuple[str, ...]
    head: str | None
    whole_rows: bool = False
    as_in_training: bool = False
    biases: tuple[str, ...] = ()
    queries: dict[str, int] = attrs.Factory(dict)
    spans: dict[str, tuple[str | None, str]] = attrs.Factory(dict)

    def pattern(self, fqn: str) -> str:
        """The pattern of `fqn`: the number of its block as `*`."""
        return in_blocks(self.blocks.removesuffix(".*"), fqn)


def in_blocks(blocks: str, fqn: str) -> str:
    """`fqn`, in which the number of its block in the list `blocks` is `*`."""
    return re.sub(rf"^{re.escape(blocks)}\.\d+(?=\.|$)", f"{blocks}.*", fqn)
