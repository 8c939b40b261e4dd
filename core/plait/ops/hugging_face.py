"""A model's form in Hugging Face's libraries: names and layouts of its tensors, and its config.json."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import attrs
from torch import Tensor

from plait.contract.model_spec import matches


class Conversion(Protocol):
    """Converts a tensor's layout; both functions return a tensor of the same shape."""

    def to_ours(self, theirs: Tensor) -> Tensor: ...

    def to_theirs(self, ours: Tensor) -> Tensor: ...


@attrs.frozen
class Same:
    """The layout is the same there."""

    def to_ours(self, theirs: Tensor) -> Tensor:
        return theirs

    def to_theirs(self, ours: Tensor) -> Tensor:
        return ours


@attrs.frozen
class Rule:
    """One kind of tensor, here and in Hugging Face's libraries.

    ours:   pattern of the FQN, in which `*` stands for one name.
    theirs: their name, with as many `*` of the same meaning; one more, the last, numbers the slices that ours stacks
            along dim 0. None: they have no such tensor; it starts at zero here.
    layout: its layout there.
    needed: for a tensor that they do not have: whether values other than zeros would be lost there.
    """

    ours: str
    theirs: str | None
    layout: Conversion = Same()
    needed: bool = False

    def names(self, fqn: str, shape: tuple[int, ...]) -> tuple[str, ...] | None:
        """Their names of the parts of `fqn`, in order; None if this rule is about another tensor."""
        found = _regex(self.ours).fullmatch(fqn)
        if found is None:
            return None
        if self.theirs is None:
            return ()
        pieces = self.theirs.split("*")
        stars = list(found.groups())
        if self.stacks:
            return tuple(_fill(pieces, [*stars, str(i)]) for i in range(shape[0]))
        return (_fill(pieces, stars),)

    @property
    def stacks(self) -> bool:
        """Whether ours is a stack of several of theirs."""
        return self.theirs is not None and self.theirs.count("*") > self.ours.count("*")


def _rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(rules)


def _patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(patterns)


@attrs.frozen
class HuggingFace:
    """A model's form in Hugging Face's libraries, which its method `hugging_face()` returns.

    rules:   the first that matches a tensor's FQN counts; every tensor needs one.
    config:  the content of config.json, from the model's options.
    skipped: patterns of their tensors that are left out; one that ends in "." stands for all that begin with it.
    """

    rules: tuple[Rule, ...] = attrs.field(converter=_rules)
    config: Mapping[str, Any] = attrs.field(factory=dict)
    skipped: tuple[str, ...] = attrs.field(default=(), converter=_patterns)

    def skips(self, name: str) -> bool:
        """Whether their tensor `name` is left out."""
        return any(name.startswith(p) if p.endswith(".") else matches(p, name) for p in self.skipped)


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(r"([^.]+)".join(re.escape(piece) for piece in pattern.split("*")))


def _fill(pieces: list[str], stars: Iterable[str]) -> str:
    return "".join(piece + star for piece, star in zip(pieces, [*stars, ""], strict=True))
