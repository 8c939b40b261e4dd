"""Packed documents in modules that mix tokens in a way of their own: each document is computed as a row of its own.

Shapes: B batch, T tokens, N documents of all rows, L tokens of the longest.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plait import PlaitError, is_planning, mix_in


class ByDocument:
    """Mixed into a module that mixes tokens: it gets each packed document as a row, filled up at its end.

    Nothing that is filled up is seen: no token sees later ones.
    """

    packed = False  # whether the rows of a batch hold several documents
    places: Tensor | None = None  # (B, T), which restart at 0 where a document starts; set by the block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        if not self.packed:
            return plain.forward(*args, **kwargs)
        if self.places is None:
            raise PlaitError("the family does not tell its blocks the positions of tokens")
        rows = _Rows(self.places)
        result = plain.forward(*rows.apart(args), **rows.apart(kwargs))
        return rows.together(result)


class TellsPlaces:
    """Mixed into a block: tells modules inside where documents start."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block: Any = self
        others = (x for x in (kwargs.get("position_ids"), *args[1:], *kwargs.values()) if isinstance(x, Tensor))
        whole = (x for x in others if x.dtype == torch.int64 and x.dim() == 2 and x.shape[0] == args[0].shape[0])
        places = next(whole, None)
        for module in block.modules():
            if isinstance(module, ByDocument):
                module.places = places
        plain: Any = super()
        return plain.forward(*args, **kwargs)


class _Rows:
    def __init__(self, places_BT: Tensor) -> None:
        self._shape = places_BT.shape
        flat = places_BT.flatten()
        self._document = (flat == 0).cumsum(0) - 1  # (B x T,): the number of each token's document
        self._place = flat
        if is_planning():  # tensors have no values: a row is one document
            rows, tokens = places_BT.shape
            starts = torch.arange(0, rows * tokens, tokens, device=flat.device)
        else:
            starts, tokens = (flat == 0).nonzero().flatten(), int(flat.max()) + 1
        steps = torch.arange(tokens, device=flat.device)
        self._index_NL = (starts[:, None] + steps).clamp(max=flat.numel() - 1)

    def apart(self, value: Any) -> Any:
        """`value`, in which tensors (B, T, ...) and (1, T, ...) have a row for each document; without masks, which are
        those of whole rows."""
        if isinstance(value, Tensor):
            batch, tokens = self._shape
            if value.dim() == 4 and value.shape[-2:] == (tokens, tokens):
                return None
            if value.dim() < 2 or value.shape[1] != tokens or value.shape[0] not in (1, batch):
                return value
            return value.expand(batch, *value.shape[1:]).flatten(0, 1)[self._index_NL]
        if isinstance(value, dict):
            return {name: self.apart(each) for name, each in value.items()}
        return type(value)(map(self.apart, value)) if type(value) in (tuple, list) else value

    def together(self, result: Any) -> Any:
        """The first tensor of `result`, with the rows of the batch."""
        if isinstance(result, tuple):
            return (self.together(result[0]), *result[1:])
        return result[self._document, self._place].unflatten(0, self._shape)


def give_documents(model: Any, mixers: Iterable[str]) -> None:
    """Let the modules that the patterns `mixers` name keep packed documents apart: they are `model.by_document`."""
    names = in_model(model, mixers)
    for fqn in names:
        mix_in(model.get_submodule(fqn), ByDocument)
        block = model.get_submodule(fqn.rpartition(".")[0])
        if not isinstance(block, TellsPlaces):
            mix_in(block, TellsPlaces)
    model.by_document = tuple(map(model.get_submodule, names))


def in_model(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The FQNs of the modules that `patterns` mean, in which `*` is the number of a block."""
    compiled = [re.compile(re.escape(pattern).replace(r"\*", r"\d+")) for pattern in patterns]
    return [fqn for fqn, _ in model.named_modules() if any(each.fullmatch(fqn) for each in compiled)]
