"""Checks for `plait verify` that a model is declared correctly: runs one process and ranks, explains differences."""

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait import IGNORE, Applied, Config, PlaitError
from plait.host import Checked, check, make_optimizer
from plait_testing.finding import GRADIENT, LOSS, Finding, bitwise, gradients_apart, numbers_apart
from plait_testing.parity import FAINT, untrained
from plait_testing.touched import touched
from plait_testing.trial import Trial, TrialResult, train
from plait_testing.widened import Widened

STEPS = 3
FIRST, LAST = "gradients, step 1", f"gradients, step {STEPS}"
LOSSES, NORMS = f"losses of {STEPS} steps", f"norms of {STEPS} steps"
LATER = tuple(f"step {number}" for number in range(2, STEPS + 1))  # what an optimizer may be the cause of
EXACT = "exact training"
INITIAL, BUFFERS, UPDATES = "initial parameters", f"buffers after {STEPS} steps", f"updates of {STEPS - 1} steps"
GROWS = (LOSSES, NORMS, UPDATES, LAST)  # differences in which an optimizer, or a chaotic model, enlarges rounding
CLOSE, TIMES = 1e-3, 3  # the largest error that rounding may have grown to; the bound, in errors of `grown`'s process


@attrs.frozen(kw_only=True)
class OfRun(Trial):
    """A trial of the model that a run's config names, on random tokens. With `documents`, those of the last step are
    packed documents.

    vocab: tokens that exist. data_ranks: data ranks of the layout under test; each has two samples.
    """

    config: Config
    vocab: int
    data_ranks: int

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels); samples have different numbers of labels, as in real data."""
        generator = torch.Generator().manual_seed(1000 + step)
        length, samples = self.config.train.seq_len, 2 * self.data_ranks
        tokens = torch.randint(0, self.vocab, (samples, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        for i, row in enumerate(labels):
            row[: i * length // (2 * samples)] = IGNORE
        return tokens[:, :-1], labels

    def positions(self, tokens: Tensor, step: int) -> Tensor | None:
        return super().positions(tokens, step) if step == self.steps - 1 else None

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Float64 also where the model casts to float32 by hand; not in what is compiled."""
        return contextlib.nullcontext() if self.config.compile.enabled else Widened()

    def optimizer(self, groups: Iterable[Any]) -> torch.optim.Optimizer:
        """The run's own, at a constant rate. Raises PlaitError if it would ignore the run's schedule, or keeps what no
        checkpoint holds, or takes a shard for the whole."""
        config = self.config
        return make_optimizer(config.optimizer, groups, schedule=config.schedule, saved=config.checkpoint.enabled)

    def apply(self, strategies: Mapping[str, Mapping[str, Any]], extra: Any = ()) -> Applied:
        return self.checked(strategies).apply()

    def checked(self, strategies: Mapping[str, Any]) -> Checked:
        """The run under these strategies in place of its own, on all ranks that call this together."""
        return check(attrs.evolve(self.config, strategy=dict(strategies)), dist.get_world_size())


class Rounded(OfRun):
    """The same, whose first parameters are rounded otherwise: each by at most one unit in its last place."""

    def apply(self, strategies: Mapping[str, Mapping[str, Any]], extra: Any = ()) -> Applied:
        applied, generator = super().apply(strategies), torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for param in applied.parameters():
                units = torch.randint(-1, 2, param.shape, generator=generator).to(param.dtype)
                param.mul_(1 + units * torch.finfo(param.dtype).eps)
        return applied


def reference(
    trial: OfRun, strategies: Mapping[str, Any], folder: Path, exact: Mapping[str, Any] | None = None
) -> float:
    """One process trains, and writes its result to `folder`. Returns its seconds.

    strategies: those that extend the model, and those whose numerics are their own. exact: the same without these, if
    there are such; one process takes one step under them too.

    Raises PlaitError if there is nothing to compare with: values that are random or not finite.
    """
    with noted(folder):
        start = time.monotonic()
        applied = trial.apply(strategies)
        tokens, _ = trial.batch(0)
        with torch.no_grad():
            first, second = (applied.parts[0](tokens) for _ in range(2))
        if not torch.equal(first, second):
            raise PlaitError(
                "the model computes different logits for the same tokens the second time, so it cannot be compared: "
                "switch off what is random in it, such as dropout"
            )
        del applied, first, second
        result = train(trial, strategies)
        if not all(map(math.isfinite, result.losses + result.norms)):
            raise PlaitError(
                f"losses {result.losses} and norms of gradients {result.norms} of one process are not all finite, so "
                "there is nothing to compare with"
            )
        if not any(result.norms):
            raise PlaitError("all gradients of one process are zero, so there is nothing to compare with")
        if exact is not None:
            first_step = attrs.evolve(trial, steps=1, documents=False)  # those come in the last of several steps
            gradients = train(first_step, exact).gradients
            torch.save(gradients, folder / "exact.pt")
        torch.save(attrs.asdict(attrs.evolve(result, final={})), folder / "reference.pt")
        return time.monotonic() - start


def compare(
    trial: OfRun,
    strategies: Mapping[str, Any],
    folder: Path,
    distance: float = 0.0,
    grown: Mapping[str, float] | None = None,
) -> tuple[list[Finding], dict[str, str]]:
    """A rank trains under `strategies`; returns how far it is from one process, and the parameters' placements.

    distance: how far gradients may be from those of exact training, if `reference` wrote them.
    grown: what is compared in later steps -> its bound, where that is larger than usual.
    """
    bounds = dict.fromkeys(GROWS, LOSS) | dict(grown or {})
    with noted(folder):
        result = train(trial, strategies)
        expected = _expected(folder)
        model = trial.checked(strategies).assembly.model
        saved = set(model.state_dict())
        found = [
            bitwise(INITIAL, result.initial, expected.initial),
            gradients_apart(FIRST, result.gradients, expected.gradients, GRADIENT),
            numbers_apart(LOSSES, result.losses, expected.losses, bounds[LOSSES]),
            numbers_apart(NORMS, result.norms, expected.norms, bounds[NORMS]),
        ]
        later = Finding(LAST, LOSS, skipped="not compared: they come after something wrong")
        if all(finding.fine or finding.at in LATER for finding in found):
            found.append(gradients_apart(UPDATES, _updates(result), _updates(expected), bounds[UPDATES]))
        else:
            found.append(attrs.evolve(later, what=UPDATES))
        if all(finding.fine for finding in found):
            later = gradients_apart(LAST, result.last, expected.last, bounds[LAST])
        found.append(later)
        trains = {name for name, p in model.named_parameters() if p.requires_grad}
        if never := untrained(result, expected, sorted(trains)):
            unseen = _unseen(trial, strategies, trains, {*never})
            found[1] = attrs.evolve(found[1], untrained=tuple(never), unseen=unseen)
        if (file := folder / "exact.pt").exists():
            exact = torch.load(file, mmap=True, weights_only=True)
            found.insert(2, gradients_apart(EXACT, result.gradients, exact, distance, FAINT))
        mine, theirs = ({k: b for k, b in t.buffers.items() if k in saved} for t in (result, expected))
        return [*found, *([bitwise(BUFFERS, mine, theirs)] if theirs else [])], result.placements


def may_be_rounding(findings: Iterable[Finding]) -> bool:
    """Whether something is off, but little, and in later steps alone."""
    off = [finding for finding in findings if not finding.fine]
    later = all(each.what in (UPDATES, LAST) or (each.what in GROWS and each.at in LATER) for each in off)
    return bool(off) and later and all(each.error <= CLOSE for each in off)


def grown(trial: OfRun, strategies: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """What is compared in later steps -> its bound: TIMES the error of one process whose first parameters differ from
    those of `reference` by a unit in the last place. Without what has no larger bound than usual.
    """
    with noted(folder):
        result = train(Rounded(**attrs.asdict(trial, recurse=False)), strategies)
        expected = _expected(folder)
        found = [
            numbers_apart(LOSSES, result.losses, expected.losses),
            numbers_apart(NORMS, result.norms, expected.norms),
            gradients_apart(UPDATES, _updates(result), _updates(expected), LOSS),
            gradients_apart(LAST, result.last, expected.last, LOSS),
        ]
        return {each.what: TIMES * each.error for each in found if each.error > LOSS / TIMES}


def _expected(folder: Path) -> TrialResult:
    """What `reference` wrote."""
    return TrialResult(**torch.load(folder / "reference.pt", mmap=True, weights_only=True))


def _updates(result: TrialResult) -> dict[str, Tensor]:
    """FQN -> how far, and where to, all steps before the last moved a parameter."""
    return {name: end - result.initial[name] for name, end in result.before.items()}


def _unseen(trial: OfRun, strategies: Mapping[str, Any], trains: set[str], never: set[str]) -> tuple[str, ...]:
    """The strategies that change some parameters of `trains`, and only such as are in `never`."""
    found = []
    for name in strategies:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, touched(trial, strategies, name))
        changed = trains & set().union(*every)
        if changed and changed <= never:
            found.append(name)
    return tuple(found)


def meaning(findings: list[Finding], documents: bool) -> list[str]:
    """The usual causes of such differences: sentences, most likely first. documents: whether the last step had some."""
    wrong = {finding.what: finding for finding in findings if not finding.fine}
    said, last = [], f"step {STEPS}"
    steps = {wrong[what].at for what in (LOSSES, NORMS) if what in wrong} | ({last} if LAST in wrong else set())
    if INITIAL in wrong:
        said.append(
            "Initial values depend on the layout: a function in `init` may use only its generator and the one row that "
            "it gets, and must not draw from torch's own generator."
        )
    elif LOSSES in wrong and wrong[LOSSES].at == "step 1":
        said += [
            "The loss of the first step is off, so forward differs. The usual causes: a non-linear function after a "
            "branch's last projection, such as a norm at its end; work between tokens outside branches; a bias whose "
            "axes do not match those of its matrix, or that is added separately from it; a count of heads in a view; "
            "queries, keys and values in one matrix; a matrix that reads or writes the stream whose axes do not name "
            "`embed`.",
        ]
    elif (off := next((wrong[what] for what in (FIRST, EXACT) if what in wrong), None)) and (factor := off.factor):
        said.append(f"All gradients are {factor:.6g} times what they should be: is something counted twice?")
    elif UPDATES in wrong:
        return [
            "Gradients are right, and steps are wrong: the optimizer treats a divided parameter otherwise than a whole "
            "one, or it enlarges what rounding leaves (docs/optimizers.md). optimizer=adamw tells whether it is "
            "the cause."
        ]
    elif documents and FIRST not in wrong and steps == {last}:
        said.append(
            f"Only {last} is wrong, whose rows are packed documents: attention, or what took its place under the "
            "strategy, does not use `positions` as docs/model-spec.md says."
        )
    elif FIRST in wrong or LAST in wrong or NORMS in wrong:
        said += [
            "Forward is right and backward is wrong: a sum over ranks is missing, or done twice. The usual causes: a "
            "module outside `branches` that works between tokens or on heads; a branch that is declared larger or "
            "smaller than it is; a bias that is separate from its matrix and starts at 0; a parameter with the `axes` "
            "of another.",
        ]
    elif EXACT in wrong:
        said.append(
            "Ranks compute what the strategy computes in one process, but that is further from exact training than its "
            "`distance` says: is one of these gradients scaled twice, or not at all?"
        )
    elif BUFFERS in wrong:
        said.append("A buffer is computed from one rank's tokens: only the balance of experts is summed over ranks.")
    said.append(
        'The rules are in docs/model-spec.md, "The rules, and why". To see whether the strategy is the cause, run '
        "the same command with a shipped model, such as model=llama3_debug."
    )
    return said


@attrs.frozen
class Failed:
    """What one rank raised. when: time of day. ours: whether it is already a sentence for the user. key: what it is
    about, if that is known."""

    when: float
    rank: int
    ours: bool
    sentence: str
    text: str
    key: str | None = None


@contextlib.contextmanager
def noted(folder: Path) -> Iterator[None]:
    """Write the error to `folder`: other ranks may fail after this one, and because of it."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of what is slow, not wrong
    try:
        yield
    except Exception as error:
        rank = dist.get_rank()
        ours, said = isinstance(error, PlaitError), "; ".join([str(error), *getattr(error, "__notes__", ())])
        sentence = said if ours else f"{type(error).__name__}: {said}"
        note = Failed(time.time(), rank, ours, sentence, traceback.format_exc(), getattr(error, "key", None))
        torch.save(attrs.asdict(note), folder / f"failed-{rank}.pt")
        raise


def failed(folder: Path) -> Failed | None:
    """The error that was raised first, preferring a sentence for the user; None if there is none."""
    notes = [Failed(**torch.load(path, weights_only=True)) for path in folder.glob("failed-*.pt")]
    order: Callable[[Failed], Any] = lambda note: (not note.ours, note.when)  # noqa: E731
    return min(notes, key=order, default=None)
