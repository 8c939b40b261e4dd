"""Where backward first goes wrong: the gradient of what modules get and return, beside that of one process; and what is
wrong with it, where the numbers of all ranks prove it."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from plait_testing.foreign.bisected import RETURNS, Looked, Spot, agrees, near, rank_and_distance, rows
from plait_testing.foreign.causes import Cause, groups
from plait_testing.foreign.subject import Comparison

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


@attrs.frozen
class Astray:
    """What a module gets or returns, in words, with the first wrong gradient in the order of backward. module: its
    name. after: what has a right gradient just before it, or "". rank: the first where it is wrong. off: how far,
    relative. cause: what is wrong with it, if that is known."""

    module: str
    what: str
    after: str
    rank: int
    off: float
    cause: Cause | None


def first_astray(comparison: Comparison, one: Looked, ranks: Sequence[Looked], within: float) -> Astray | None:
    """None if all agree in some form: whole, as parts along a dim, or as summands; or if shapes say nothing."""
    scale = comparison.data_ranks if comparison.losses == "mean" else 1
    after = ""
    for key, right in one.gradients.items():
        found = [ran.gradients[key].double() / scale for ran in ranks if key in ran.gradients]
        if len(found) < len(ranks):
            continue
        fine = agrees(comparison, found, right.double(), within)
        if fine:
            after = _words(one, key)
        elif fine is False:
            rank, off = rank_and_distance(comparison, found, right.double(), within)
            values = [ran.values[key].double() for ran in ranks]
            seen = _Seen(comparison, _words(one, key), one.values[key].double(), right.double(), values, found, within)
            cause = seen.masked() or (seen.uniform() if key[1] == RETURNS else None)
            return Astray(key[0], _words(one, key), after, rank, off, cause)
    return None


def _words(one: Looked, key: Spot) -> str:
    """Such as "what blocks.0 (Block) gets as its second tensor"."""
    module, side, place = key
    kind = one.kinds[module]
    named = f"{module} ({kind})" if module else f"the model ({kind})"
    several = any(other[:2] == key[:2] and other[2] != place for other in one.values)
    nth = ORDINALS[place] if place < len(ORDINALS) else f"{place + 1}th"
    return f"what {named} {side}" + (f" as its {nth} tensor" if several else "")


@attrs.frozen
class _Seen:
    """One tensor and its gradient. whole, right: of one process. values, found: of each rank."""

    comparison: Comparison
    what: str
    whole: Tensor
    right: Tensor
    values: Sequence[Tensor]
    found: Sequence[Tensor]
    within: float

    def masked(self) -> Cause | None:
        """Ranks share the tensor by zeros, and learn from the places that are zero: without these the sum is right."""
        if any(value.shape != grad.shape for value, grad in zip(self.values, self.found, strict=True)):
            return None
        for axis, size in self.comparison.mesh.items():
            if size > 1 and axis not in self.comparison.data_axes and self._learn_from_zeros(axis):
                said = (
                    f"{self.what} is shared over {axis}: each place counts on one rank, and is zero on the others. "
                    "Zeros get a gradient too, of what their rank computes there in vain; without it the sum is right"
                )
                return Cause("masked places", said, axis)
        return None

    def _learn_from_zeros(self, axis: str) -> bool:
        for group in groups(self.comparison, axis):
            whole, right = (rows(self.comparison, t, group[0]) for t in (self.whole, self.right))
            mine = torch.stack([self.values[rank] != 0 for rank in group])
            if whole.shape != mine.shape[1:] or int(mine.sum(0).max()) != 1 or not all(m.any() for m in mine):
                return False
            if not near(torch.stack([self.values[rank] for rank in group]).sum(0), whole, self.within):
                return False
            if not near((torch.stack([self.found[rank] for rank in group]) * mine).sum(0), right, self.within):
                return False
        return True

    def uniform(self) -> Cause | None:
        """Ranks have parts of logits, and what a loss gives to every entry alike is that of a vocabulary of one part.

        The gradient of a row of logits is s (p - u) but at the label, p the softmax. s and u are those of the line
        through the points (p, gradient); u is alpha / V or alpha / (V - 1) for a label smoothed by alpha.
        """
        for axis, size in self.comparison.mesh.items():
            if size < 2 or axis in self.comparison.data_axes or self.whole.dim() < 2 or self.whole.shape[-1] % size:
                continue
            told = [self._uniform(group) for group in groups(self.comparison, axis)]
            entries = self.whole.shape[-1]
            part = entries // size
            for times, why in (
                (entries / part, f"{entries} / {part}"),
                ((entries - 1) / max(part - 1, 1), f"({entries} - 1) / ({part} - 1)"),
            ):
                if all(each is not None and abs(each - times) < 1e-3 * times for each in told):
                    said = (
                        f"each rank of {axis} takes its part of the vocabulary for all of it: what the loss gives to "
                        f"every entry alike, as label smoothing does, is {times:.4g} = {why} times what it should be"
                    )
                    return Cause("part of the vocabulary", said, axis, times)
        return None

    def _uniform(self, group: Sequence[int]) -> float | None:
        """How many times what it should be u is on these ranks; None if their gradients differ in another way."""
        whole, right = (rows(self.comparison, t, group[0]).flatten(0, -2) for t in (self.whole, self.right))
        parts = [self.found[rank] for rank in group]
        joined = (torch.cat(parts, -1) if parts[0].shape[-1] < whole.shape[-1] else parts[0]).flatten(0, -2)
        counts = right.norm(dim=-1) > 0
        if joined.shape != right.shape or not counts.any():
            return None
        p, right, error = whole[counts].softmax(-1), right[counts], (joined - right)[counts]
        alike = error.median(-1, keepdim=True).values
        allowed = self.within * right.norm(dim=-1, keepdim=True)
        other = (error - alike).abs() > allowed
        if int(other.sum(-1).max()) > 1:  # the label alone may be another
            return None
        other |= right == right.min(-1, keepdim=True).values
        line = torch.where(other, 0.0, 1.0)
        number = line.sum(-1, keepdim=True)
        p_mean, g_mean = ((line * t).sum(-1, keepdim=True) / number for t in (p, right))
        slope = (line * (p - p_mean) * (right - g_mean)).sum(-1, keepdim=True)
        slope = slope / (line * (p - p_mean) ** 2).sum(-1, keepdim=True)
        uniform = slope * p_mean - g_mean
        if bool((line * (right - slope * p + uniform)).abs().gt(allowed).any()):
            return None
        return float((uniform - alike).sum() / uniform.sum())
