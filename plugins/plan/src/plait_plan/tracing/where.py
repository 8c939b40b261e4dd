"""Which module runs, in forward and in backward: from hooks on modules and the numbers of autograd's nodes."""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from plait_plan.torch_internals import next_node, node_number


class Where:
    """`with Where(parts, closed) as where:`; then `where.now()` while one of these modules runs.

    closed: FQNs of modules whose inside is not watched, as a compiler would take hooks there into its graph.

    An operator of forward belongs to the innermost module whose forward runs. One of backward belongs to the module
    whose forward created the autograd node that runs now: nodes are numbered in the order of their creation.
    """

    def __init__(self, parts: Sequence[nn.Module], closed: Iterable[str] = ()) -> None:
        self.parts, self._closed = parts, tuple(f"{fqn}." for fqn in closed)
        self._stack: list[str] = []
        self._starts: list[int] = []  # numbers of nodes, ascending; from each number on a module created them
        self._makers: list[str] = []
        self._last = ""
        self._hooks: list[Any] = []

    def __enter__(self) -> "Where":
        for fqn, module in [named for part in self.parts for named in part.named_modules()]:
            if fqn.startswith(self._closed):
                continue

            def enter(module: nn.Module, args: Any, fqn: str = fqn) -> None:
                self._enter(fqn)

            def leave(module: nn.Module, args: Any, result: Any, fqn: str = fqn) -> None:
                self._leave(fqn)

            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """What runs here in forward, and its backward, belongs to `name`, as if that were a module."""
        self._enter(name)
        try:
            yield
        finally:
            self._leave(name)

    def now(self, backward: bool) -> tuple[str, bool]:
        """(FQN of the module, whether it recomputes forward) for the current operator."""
        if self._stack:
            return self._stack[-1], backward
        if not backward:
            return "", False
        number = node_number()
        if number is not None:  # a gradient being added to its parameter has none: it belongs to its creator
            at = bisect.bisect_right(self._starts, number) - 1
            self._last = self._makers[at] if at >= 0 else ""
        return self._last, False

    def in_the_open(self) -> bool:
        """Whether a module outside of the closed ones runs forward."""
        return bool(self._stack) and not f"{self._stack[-1]}.".startswith(self._closed)

    def forget(self) -> None:
        """Forget the autograd nodes of the last step, which no longer exist."""
        self._starts, self._makers, self._last = [], [], ""

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._mark(name)

    def _leave(self, name: str) -> None:
        if self._stack and self._stack[-1] == name:
            self._stack.pop()
        self._mark(self._stack[-1] if self._stack else "")

    def _mark(self, fqn: str) -> None:
        number = next_node()
        if self._starts and self._starts[-1] == number:
            self._makers[-1] = fqn
        else:
            self._starts.append(number)
            self._makers.append(fqn)
