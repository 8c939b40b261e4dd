"""Maps tensors under one set of names to those under the other; the whole mapping is known before any is read."""

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor, nn

from plait import PlaitError, near_miss
from plait.host import weights
from plait.ops import HuggingFace, Rule


class Held:
    """Weights in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.what, self._tensors = "the state dict", tensors
        self.beside: Mapping[str, str] = {}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes: Mapping[str, torch.dtype] = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, name: str, index: int | None = None) -> Tensor:
        return self._tensors[name] if index is None else self._tensors[name][index]


@attrs.frozen
class ConvertedTensor:
    """One tensor of the result.

    parts: the names in the source that it is made of; none for zeros, more than one for a stack.
    index: the slice of a single part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[str, ...]
    rule: Rule
    index: int | None = None

    @property
    def bytes(self) -> int:
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes


def table_of(model: nn.Module) -> HuggingFace:
    """The model's table. Raises PlaitError if it has none."""
    describe = getattr(model, "hugging_face", None)
    if not callable(describe):
        raise PlaitError(
            f"{type(model).__name__} does not say what its tensors are called in Hugging Face's libraries: give it a "
            "method `hugging_face()` that returns a plait.ops.HuggingFace"
        )
    return describe()


def ours_from(model: nn.Module, source: weights.Weights) -> list[ConvertedTensor]:
    """The tensors of `model`, which may be on meta, from those of Hugging Face's libraries.

    Raises PlaitError, naming the first, for tensors that are missing, have another shape or belong to nothing.
    """
    table, own, aliases = table_of(model), weights.of(model), _aliases(model)
    used: set[str] = set()
    pieces = []
    for fqn, tensor in own.items():
        shape = tuple(tensor.shape)
        rule, names = _rule(table, fqn, shape)
        for alias in aliases.get(fqn, ()):
            _, theirs = _rule(table, alias, shape)
            if any(name in source.shapes for name in theirs):
                if not all(name in source.shapes for name in names):
                    names = theirs
                elif theirs != names:
                    _same(source, names, theirs)
                used.update(theirs)
        for name in names:
            _expect(source, name, shape[1:] if rule.stacks else shape, done=fqn)
        used.update(names)
        dtype = source.dtypes[names[0]] if names else tensor.dtype
        if tensor.is_floating_point() and not dtype.is_floating_point:
            kind = str(dtype).removeprefix("torch.")
            raise PlaitError(
                f"{names[0]!r} of {source.what} is of {kind}, quantised: Plait converts only unquantised weights"
            )
        pieces.append(ConvertedTensor(fqn, shape, dtype, names, rule))
    _nothing_left(source, used, table, [name for name in used if name not in source.shapes])
    return pieces


def theirs_from(model: nn.Module, source: weights.Weights) -> list[ConvertedTensor]:
    """The tensors of Hugging Face's libraries for `model`, from its own, by canonical FQN. Raises like `ours_from`,
    and also if the model has learned something that they have no place for."""
    table, own, aliases = table_of(model), weights.of(model), _aliases(model)
    used: set[str] = set()
    pieces = []
    for fqn, tensor in own.items():
        shape = tuple(tensor.shape)
        rule, names = _rule(table, fqn, shape)
        found = [name for name in (fqn, *aliases.get(fqn, ())) if name in source.shapes]
        for other in found[1:]:
            _same(source, (found[0],), (other,))
        used.update(found)
        part = found[0] if found else fqn
        _expect(source, part, shape, done=names[0] if names else "")
        if not names and rule.needed and bool(source.read(part).any()):
            raise PlaitError(f"{part!r} of {source.what} is not zero, and Hugging Face's form has no place for it")
        for i, name in enumerate(names):
            index = i if rule.stacks else None
            pieces.append(
                ConvertedTensor(name, shape[1:] if rule.stacks else shape, source.dtypes[part], (part,), rule, index)
            )
    _nothing_left(source, used, None, list(own))
    return pieces


def make_ours(piece: ConvertedTensor, source: weights.Weights) -> Tensor:
    """The tensor itself, contiguous."""
    if not piece.parts:
        return torch.zeros(piece.shape, dtype=piece.dtype)
    if not piece.rule.stacks:
        return piece.rule.layout.to_ours(source.read(piece.parts[0])).contiguous()
    stack = torch.empty(piece.shape, dtype=piece.dtype)
    for row, name in zip(stack, piece.parts, strict=True):
        row.copy_(piece.rule.layout.to_ours(source.read(name)))
    return stack


def make_theirs(piece: ConvertedTensor, source: weights.Weights) -> Tensor:
    """The tensor itself, contiguous."""
    return piece.rule.layout.to_theirs(source.read(piece.parts[0], piece.index)).contiguous()


def from_hf(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with Hugging Face's names as a state dict of `model`; tied tensors are included once.

    Raises PlaitError if they are not this model's. Tensors that need no change share memory.
    """
    source = Held(tensors)
    return {piece.name: make_ours(piece, source) for piece in ours_from(model, source)}


def to_hf(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of `model`, or `tensors` under its names, with Hugging Face's names. Raises like `from_hf`."""
    source = Held(weights.of(model) if tensors is None else tensors)
    return {piece.name: make_theirs(piece, source) for piece in theirs_from(model, source)}


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Canonical FQN of a tied tensor -> its other names."""
    aliases: dict[str, list[str]] = {}
    for alias, first in weights.ties(model).items():
        aliases.setdefault(first, []).append(alias)
    return aliases


def _rule(table: HuggingFace, fqn: str, shape: tuple[int, ...]) -> tuple[Rule, tuple[str, ...]]:
    for rule in table.rules:
        names = rule.names(fqn, shape)
        if names is not None:
            return rule, names
    raise PlaitError(f"the model's table for Hugging Face says nothing about {fqn!r}: no rule matches it")


def _expect(source: weights.Weights, name: str, shape: tuple[int, ...], done: str) -> None:
    """`done`: its name in the other form."""
    if name not in source.shapes and done in source.shapes:
        raise PlaitError(f"{source.what} is already in that form: it has {done!r} and no {name!r}")
    if name not in source.shapes:
        raise PlaitError(f"{source.what} lacks {name!r}{near_miss(name, list(source.shapes))}")
    if source.shapes[name] != shape:
        raise PlaitError(f"{name!r} has shape {source.shapes[name]} in {source.what}, and {shape} in the model")


def _nothing_left(source: weights.Weights, used: set[str], table: HuggingFace | None, known: list[str]) -> None:
    for name in source.shapes:
        if name not in used and not (table and table.skips(name)):
            raise PlaitError(f"{source.what} has {name!r}, which the model has no place for{near_miss(name, known)}")


def _same(source: weights.Weights, names: tuple[str, ...], others: tuple[str, ...]) -> None:
    for name, other in zip(names, others, strict=True):
        one, two = source.read(name), source.read(other)
        if one.shape != two.shape or not ((one == two) | (one.isnan() & two.isnan())).all():
            raise PlaitError(
                f"{name!r} and {other!r} differ in {source.what}, but the model ties them: untie them in its config, "
                "or remove the one that is wrong"
            )
