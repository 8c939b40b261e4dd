"""The questions of a comparison: how each is run, what its answer is compared with, and how near it must be."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from plait import PlaitError
from plait_testing.finding import Finding, bitwise, gradients_apart, numbers_apart
from plait_testing.foreign.batches import shares
from plait_testing.foreign.rounding import Bounds
from plait_testing.foreign.runs import Ran, Variant, check_no_chance, in_order, run
from plait_testing.foreign.subject import QUESTIONS, Comparison

PLAIN = "plain"
INITIAL, LOSS, GRADIENTS = "initial parameters", "loss", "gradients"
WORDS = {**QUESTIONS, "initial": INITIAL, "loss": LOSS, "gradients": GRADIENTS}


@attrs.frozen
class Answer:
    """One question's answer. key: a key of `off`, or "initial", "loss" or "gradients". skipped: why it was not asked.
    raised: what the code under test raised instead of an answer."""

    key: str
    finding: Finding | None = None
    skipped: str = ""
    raised: str = ""

    @property
    def fine(self) -> bool:
        return not self.raised and (self.finding is None or self.finding.fine)

    @property
    def status(self) -> str:
        return "wrong" if not self.fine else "skipped" if self.skipped else "ok"


def variants(comparison: Comparison) -> tuple[list[Variant], list[Answer]]:
    """(what is run, the questions that are not asked)."""
    left_out = [Answer(key, skipped=reason) for key, reason in comparison.off.items()]
    first = comparison.batch(0)
    if not isinstance(first, Mapping) or not all(isinstance(each, Tensor) for each in first.values()):
        raise PlaitError(
            f"batch must return a dict of tensors with the rows in dim 0, and returned {type(first).__name__}"
        ).at("batch")
    labels = "labels" in first
    without = {
        "documents": "" if comparison.packed else "no batch of packed documents is given: packed=",
        "unequal": "" if labels else "the batch has no labels",
        "accumulation": "" if labels else "the batch has no labels",
    }
    left_out += [Answer(key, skipped=why) for key, why in without.items() if why and key not in comparison.off]
    asked = QUESTIONS.keys() - {answer.key for answer in left_out}
    steps = comparison.steps if asked & {"steps", "saved"} else 1
    every = [
        Variant(PLAIN, steps=steps, saved="saved" in asked),
        Variant("unequal", unequal=True),
        Variant("accumulation", unequal=True, parts=2),
        Variant("documents", packed=True),
        Variant("recomputation", recomputed=True),
        Variant("frozen", frozen=True),
    ]
    asked_of = [variant for variant in every if variant.key == PLAIN or variant.key in asked]
    for variant in asked_of:
        shares(comparison, first, rank=0, parts=variant.parts)  # raises if the rows cannot be divided
    return asked_of, left_out


def one_process(comparison: Comparison, asked: Sequence[Variant], folder: Path) -> dict[str, Any]:
    """Writes to `folder` what one process computes in each variant, with the bounds of differences. Returns what is
    known of the model."""
    check_no_chance(comparison)
    found, bounds = {}, {}
    for variant in asked:
        found[variant.key], bounds[variant.key] = Bounds.around(comparison, variant)
    torch.save(attrs.asdict(found[PLAIN])["initial"], folder / "initial.pt")
    torch.save((found, bounds), folder / "one.pt")
    return {"parameters": sum(t.numel() for t in found[PLAIN].initial.values())}


def on_ranks(comparison: Comparison, variant: Variant, folder: Path) -> None:
    """Runs one variant on the ranks that call this together; each writes what it computed to `folder`."""
    import torch.distributed as dist

    expected = torch.load(folder / "initial.pt", weights_only=True)
    ran = run(comparison, variant, expected, ranks=True, folder=folder / f"saved-{variant.key}")
    torch.save(ran, folder / f"{variant.key}-{dist.get_rank()}.pt")


def answers(comparison: Comparison, variant: Variant, one: Ran, ranks: Sequence[Ran], bounds: Bounds) -> list[Answer]:
    """How far the ranks are from one process in a variant."""
    if unasked := _first(ran.unasked for ran in ranks):
        return [Answer(variant.key, skipped=unasked)]
    loss = numbers_apart("", joined(comparison, ranks), numbers(one.losses), bounds.loss)
    gradients = worst([gradients_apart("", ran.gradients, ordered(one), bounds.gradients) for ran in ranks])
    if variant.key != PLAIN:
        both = gradients if loss.fine or not gradients.fine else attrs.evolve(loss, at=f"the loss, {loss.at}")
        return [Answer(variant.key, both)]
    found = [
        Answer("initial", worst([bitwise("", ran.initial, one.initial) for ran in ranks])),
        Answer("loss", loss),
        Answer("gradients", gradients),
    ]
    asked = QUESTIONS.keys() - comparison.off.keys()
    if unclipped := _first(ran.unclipped for ran in ranks):
        found += [Answer("norm", skipped=unclipped)] * ("norm" in asked)
    elif "norm" in asked:
        norms = worst(
            [
                numbers_apart("", ran.norms[: len(one.losses)], one.norms[: len(one.losses)], bounds.norm)
                for ran in ranks
            ]
        )
        clipped = worst([gradients_apart("", ran.clipped, ordered(one, one.clipped), bounds.clipped) for ran in ranks])
        found.append(Answer("norm", norms if clipped.fine or not norms.fine else clipped))
    if "steps" in asked:
        ways = [gradients_apart("", way(ran, ran.final), way(one, one.final), bounds.way) for ran in ranks]
        found.append(Answer("steps", worst(ways)))
    if "saved" in asked and (unkept := _first(ran.unkept for ran in ranks)):
        found.append(Answer("saved", skipped=unkept))
    elif "saved" in asked and (unsaved := _first(ran.unsaved for ran in ranks)):
        found.append(Answer("saved", raised=unsaved))
    elif "saved" in asked:
        restored = worst([bitwise("", ran.restored, ran.final) for ran in ranks])
        later = worst([gradients_apart("", way(ran, ran.later), way(one, one.later), bounds.later) for ran in ranks])
        found.append(Answer("saved", later if restored.fine else restored))
    return found


def _first(said: Iterable[str]) -> str:
    """What the first rank says that says something; "" if none does."""
    return next(filter(None, said), "")


def joined(comparison: Comparison, ranks: Sequence[Ran]) -> list[float]:
    """The loss of each step: the mean over ranks that compute one, or the sum over data ranks."""
    found = []
    for losses in zip(*(ran.losses for ran in ranks), strict=True):
        some = [loss for loss in losses if loss is not None]
        mean = sum(some) / len(some) if some else math.nan
        found.append(mean * comparison.data_ranks if comparison.losses == "sum" else mean)
    return found


def numbers(losses: Sequence[float | None]) -> list[float]:
    return [math.nan if loss is None else loss for loss in losses]


def ordered(one: Ran, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Gradients of one process in the order in which forward uses the parameters."""
    tensors = one.gradients if tensors is None else tensors
    return {name: tensors[name] for name in in_order(tensors, one.order)}


def way(ran: Ran, end: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far each parameter went."""
    names = in_order(end, ran.order) if ran.order else list(end)
    return {name: end[name].double() - ran.initial[name].double() for name in names}


def worst(findings: Sequence[Finding]) -> Finding:
    first, *others = findings
    for other in others:
        first = first.joined(other)
    return first
