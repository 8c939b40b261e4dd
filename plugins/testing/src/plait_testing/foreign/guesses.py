"""Mistakes about a whole batch, each computed in one process: one whose gradients are those of the ranks is named."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from plait import IGNORE
from plait_testing.foreign import batches
from plait_testing.foreign.runs import Side, Variant
from plait_testing.foreign.subject import Comparison, Share
from plait_testing.widened import Widened


@attrs.frozen
class Guess:
    """kind: a word for programs. sentence: what is wrong if the ranks' gradients are `gradients`, or a multiple."""

    kind: str
    sentence: str
    gradients: dict[str, Tensor]


Mistake = tuple[str, str, list[Share]]


def guesses(comparison: Comparison, variant: Variant, values: Mapping[str, Tensor]) -> list[Guess]:
    """What one process computes if it makes each mistake that this batch can show."""
    found = []
    exact = attrs.evolve(comparison, dtype="float64", rounded=None)
    with Widened():
        side = Side(exact, variant, {n: v.double() for n, v in values.items()}, ranks=False)
        for kind, sentence, shares in _mistakes(exact, variant, side.batch(0)):
            for param in side.parallel.model.parameters():
                param.grad = None
            try:
                side.backward(shares)
            except (TypeError, ValueError, RuntimeError, KeyError, IndexError):
                continue  # the model or the loss takes no such batch
            found.append(Guess(kind, sentence, side.held.gradients()))
    return found


def _mistakes(comparison: Comparison, variant: Variant, batch: dict[str, Tensor]) -> Iterator[Mistake]:
    if "labels" not in batch:
        return
    labels, (rows, length) = batch["labels"], batch["labels"].shape[:2]

    def with_(**changed: Tensor) -> list[Share]:
        return [batches.whole({**batch, **changed})]

    if (count := comparison.data_ranks * variant.parts) > 1 and len({each.total for each in _alone(batch, count)}) == 1:
        yield (
            "rows mix",
            "the rows of a rank or micro-batch change each other's results, as in batch normalisation: one process "
            "sees all rows at once, so the two cannot agree",
            _alone(batch, count),
        )
    elif count > 1:
        yield (
            "own counts",
            "each rank or micro-batch divides by its own count of labels, so that a label weighs more where there are "
            "few: divide by the count of all (`batch.total`)",
            _alone(batch, count),
        )
    if variant.parts > 1:
        yield from _accumulated(comparison, variant, batch)
    for axis, size in comparison.mesh.items():
        if size == 1 or length % size:
            continue
        step = length // size
        for lost in (0, -1):  # the first label of each part but the first, if the model shifts; else its last
            masked = labels.clone()
            masked[:, [i * step + lost for i in range(1, size)]] = IGNORE
            said = f"labels are shifted after the sequence was split over {axis}: the label at each border is lost"
            yield "labels shifted after the split", said, with_(labels=masked)
        said = f"positions begin at 0 in each part that the sequence is split into over {axis}"
        restarted = (torch.arange(length) % step).expand(rows, length)
        yield "positions restart", said, with_(**{comparison.positions: restarted})
    for by, told in ((1, "once too often"), (-1, "once too seldom")):
        rolled = labels.roll(-by, 1)
        rolled[:, -1 if by > 0 else 0] = IGNORE
        yield "labels shifted", f"labels are shifted {told}", with_(labels=rolled)
    if variant.packed:
        said = "tokens see the document before their own, as if a row were one document"
        itself = "the model itself does not keep documents apart: one process computes the same from packed rows"
        yield "documents see each other", itself, with_()
        straight = torch.arange(length).expand(rows, length)
        yield "documents see each other", said, with_(**{comparison.positions: straight})


def _accumulated(comparison: Comparison, variant: Variant, batch: dict[str, Tensor]) -> Iterator[Mistake]:
    """What a sum over micro-batches is if earlier ones are lost, or are reduced once more with each later one."""
    ranks = [batches.shares(comparison, batch, rank, variant.parts) for rank in range(comparison.world)]
    own = {comparison.data_rank(rank): shares for rank, shares in enumerate(ranks)}.values()
    parts = [{key: torch.cat([share[key] for share in each]) for key in batch} for each in zip(*own, strict=True)]
    total = batches.counted(batch)
    yield "earlier lost", "only the last micro-batch counts: each writes over the sum", [Share(parts[-1], total)]
    for axis, size in comparison.mesh.items():
        weights = [size ** (len(parts) - 1 - i) for i in range(len(parts))]
        said = f"earlier micro-batches count {size} times: their sum is reduced over {axis} again with each later one"
        shares = [Share(part, total) for part in parts]
        for share, weight in zip(shares, weights, strict=True):
            share.total = total / weight  # a loss divides by it
        yield "reduced again", said, shares


def _alone(batch: Mapping[str, Tensor], count: int) -> list[Share]:
    """Parts of equal weight, each of which divides by its own count of labels."""
    size = len(next(iter(batch.values()))) // count
    found = []
    for i in range(count):
        part = {key: t[i * size : (i + 1) * size] for key, t in batch.items()}
        found.append(Share(part, batches.counted(part)))
    return found


def matching(
    found: Sequence[Guess], ranks: Sequence[Mapping[str, Tensor]], within: float
) -> tuple[Guess, float] | None:
    """(the first whose gradients the ranks' mean is a multiple of, the factor); None if there is none. ranks: gradients
    that are wrong."""
    names = set.intersection(*({*gradients} for gradients in ranks)) if ranks else set()
    mean = {name: torch.stack([gradients[name].double() for gradients in ranks]).mean(0) for name in sorted(names)}
    for guess in found:
        if not names or not all(n in guess.gradients and mean[n].shape == guess.gradients[n].shape for n in names):
            continue
        a = torch.cat([mean[name].flatten() for name in sorted(names)])
        b = torch.cat([guess.gradients[name].double().flatten() for name in sorted(names)])
        if not float(b.square().sum()):
            continue
        factor = float((a @ b) / (b @ b))
        if factor and float((a - factor * b).norm()) <= within * abs(factor) * float(b.norm()):
            return guess, factor
    return None
