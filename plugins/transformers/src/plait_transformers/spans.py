"""Attention and feed-forwards that no branch holds: a block adds their result to the stream, or norms the sum, inside
a module that holds the last matrix, or has their matrices itself.

Strategies then sum what the last matrix returns, whoever adds it.
"""

from collections.abc import Collection, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait_transformers.branch import shares_add_up
from plait_transformers.matrices import is_matrix
from plait_transformers.supposed import Division, between
from plait_transformers.watch import Watch, same


@attrs.frozen
class Span:
    """reader: the module that reads the stream; None: several matrices of the block do. writer: the matrix that writes
    to it. division: how both are divided."""

    reader: str | None
    writer: str
    division: Division

    @property
    def axis(self) -> str:
        """What is divided: heads, or a feed-forward."""
        (own,) = (axes[::-1] for name, axes in self.division.axes.items() if name == f"{self.writer}.weight")
        return str(next(axis for axis in own if axis != "embed"))


def divided_spans(fqn: str, block: nn.Module, watch: Watch, others: Collection[str]) -> Iterator[Span]:
    """What of the block `fqn` may be divided, a matrix that writes to the stream each.

    others: branches, whose matrices are not looked at.
    """
    for readers, writer in _groups(fqn, block, watch, others):
        for division in between(fqn, block, readers, writer, _mix(fqn, block, readers, writer, watch), watch):
            try:
                if shares_add_up(fqn, block, watch.calls[fqn], division, watch, at=writer):
                    own = {name: axes for name, axes in division.axes.items() if {*axes} - {None}}
                    yield Span(_around(readers, writer, watch), writer, attrs.evolve(division, axes=own))
                    break
            except Exception:  # a half that the block cannot compute is no share of it
                continue


def _around(readers: list[str], writer: str, watch: Watch) -> str | None:
    """The module that gets the stream for all `readers`, and returns before `writer` is called."""
    names = readers[0].split(".")
    for length in range(len(names), 0, -1):
        outer = ".".join(names[:length])
        if all(f"{name}.".startswith(f"{outer}.") for name in readers):
            call = watch.calls.get(outer)
            reads = call is not None and same(call.entered, watch.calls[readers[0]].entered)
            return outer if reads and watch.places[outer] < watch.places[writer] else None
    return None


def _groups(fqn: str, block: nn.Module, watch: Watch, others: Collection[str]) -> Iterator[tuple[list[str], str]]:
    """(matrices that are called with one tensor, the next one), if that one leads back to the width of the stream."""
    names = [f"{fqn}.{name}" for name, module in block.named_modules() if is_matrix(module)]
    once = [n for n in names if len(watch.places.get(n, ())) == 1 and not any(n.startswith(f"{o}.") for o in others)]
    readers = list[str]()
    for name in sorted(once, key=lambda n: watch.places[n]):
        call = watch.calls[name]
        if readers and same(call.entered, watch.calls[readers[0]].entered):
            readers.append(name)
        elif readers and call.widths()[1] == watch.calls[readers[0]].widths()[0]:
            yield readers, name
            readers = []
        else:
            readers = [name]


@torch.no_grad()
def _mix(fqn: str, block: nn.Module, readers: list[str], writer: str, watch: Watch) -> bool:
    """Whether tokens are mixed between `readers` and `writer`: others change with what is read of one."""
    seen = list[Tensor]()

    def other(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        changed = result.clone()
        changed[0, 3] += 1.0
        return changed

    inside = {name: block.get_submodule(name.removeprefix(f"{fqn}.")) for name in (*readers, writer)}
    hooks = [inside[name].register_forward_hook(other) for name in readers]
    hooks.append(inside[writer].register_forward_pre_hook(lambda module, args: seen.append(args[0])))
    block(*watch.calls[fqn].args, **watch.calls[fqn].kwargs)
    for hook in hooks:
        hook.remove()
    usual = watch.calls[writer].entered
    assert usual is not None
    change = (seen[0] - usual).abs()
    change[0, 3] = 0
    return float(change.max()) > 0
