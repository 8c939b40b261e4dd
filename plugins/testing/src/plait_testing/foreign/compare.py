"""`plait.testing.compare`: runs a comparison on ranks that it starts, and says what is wrong."""

import contextlib
import importlib
import os
import re
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from plait import PlaitError
from plait.host import Scratch, check_ranks
from plait_testing.declared import failed, noted
from plait_testing.finding import LOSS, Finding
from plait_testing.foreign import asked, guesses
from plait_testing.foreign.asked import PLAIN, Answer
from plait_testing.foreign.astray import Astray, first_astray
from plait_testing.foreign.bisected import Looked, Looking, first_apart
from plait_testing.foreign.causes import Cause, cause, of_losses
from plait_testing.foreign.report import First, Report
from plait_testing.foreign.rounding import Bounds
from plait_testing.foreign.runs import Ran, Variant, run
from plait_testing.foreign.subject import Comparison
from plait_testing.pool import Pool, RankError

AS_LONG = 5  # times what one process took, beside the comparison's patience, may the ranks take for one question
UNCLEAR = ("other", "part", "parts scaled", "copies differ", "not summed, scaled")  # guessed at once more
DIED = re.compile(r"the process of rank \d+ died \(exit code [^)]*\)")
LIBRARY = re.compile(r"site-packages|plait_testing|/lib/python3|^<")
PLAINLY = 1e-6  # two gradients that are this near are one
ROUNDED = {"float32": 1e-3, "bfloat16": 0.1}  # activations and their gradients that are this near are one
AT_ONCE = ("gradients", "unequal", "frozen")  # questions whose mistake shows in a plain batch too


def compare(comparison: Comparison, pool: Pool | None = None) -> Report:
    """Compare parallel code with one process, on ranks over gloo on this machine's processor.

    pool: ranks to run on; None: they are started, and ended. In a script call it below `if __name__ == "__main__":`.
    Raises PlaitError if there is nothing to compare: one process fails, or the two sides have other parameters.
    """
    check_ranks(comparison.world, "cpu")
    with contextlib.ExitStack() as stack:
        folder: Path = stack.enter_context(Scratch())
        if pool is None:
            pool = Pool(comparison.world, imports=_modules(comparison))
            stack.callback(pool.close)
        return _Compared(comparison, pool, folder).report()


class _Compared:
    def __init__(self, comparison: Comparison, pool: Pool, folder: Path) -> None:
        self.comparison, self.pool, self.folder = comparison, pool, folder
        self.variants, self.skipped = asked.variants(comparison)
        self.ranks: dict[str, list[Ran]] = {}

    def report(self) -> Report:
        started = time.monotonic()
        about = self._call(_one_process, self.comparison, self.variants, self.folder, world=1)
        if isinstance(about, str):
            raise PlaitError(f"one process fails: {about}")
        alone = time.monotonic() - started
        self.one: dict[str, Ran]
        self.bounds: dict[str, Bounds]
        self.one, self.bounds = self._read("one")
        answers = [*self.skipped]
        for variant in self.variants:
            answers += self._answers(variant, self.comparison.patience + AS_LONG * alone)
        found = {answer.key: answer for answer in answers}
        first = self._first(found)
        forward = backward = None
        unclear = first is not None and first.cause.kind in UNCLEAR and first.question in AT_ONCE
        if (unclear or not found["loss"].fine) and PLAIN in self.ranks and (looked := self._looked()) is not None:
            one, ranks = looked
            if not found["loss"].fine:
                outputs = [each.outputs() for each in ranks]
                forward = first_apart(self.comparison, one.outputs(), one.kinds, outputs, self._rounding(LOSS))
            if first is not None and unclear and forward is None:
                backward = first_astray(self.comparison, one, ranks, self._rounding(PLAINLY))
                first = _explained(first, backward)
        both = (alone, time.monotonic() - started - alone)
        return Report(self.comparison, about["model"], about["parameters"], answers, first, forward, backward, both)

    def _call(self, fn: Any, *args: Any, world: int, timeout: float | None = None) -> Any:
        """What the first rank answers; a str: what the code under test raised. Raises its PlaitErrors."""
        for file in self.folder.glob("failed-*.pt"):
            file.unlink()
        try:
            return self.pool.run(fn, *args, world=world, timeout=timeout or 10 * self.comparison.patience)[0]
        except RankError as error:
            note, said = failed(self.folder), str(error)
            if died := DIED.search(said):
                return died[0]  # what the others say follows from it
            if note is None:
                return said.splitlines()[0] + _stuck(said)
            if note.ours:
                about = PlaitError(note.sentence)
                raise (about.at(note.key) if note.key else about) from None
            return f"{note.sentence} (rank {note.rank}, {_where(note.text)})"

    def _answers(self, variant: Variant, patience: float) -> list[Answer]:
        done = self._call(
            _on_ranks, self.comparison, variant, self.folder, world=self.comparison.world, timeout=patience
        )
        if isinstance(done, str):
            if variant.key != PLAIN:
                return [Answer(variant.key, raised=done)]
            raise PlaitError(f"the ranks fail: {done}")
        self.ranks[variant.key] = self._read_all(variant.key)
        return asked.answers(
            self.comparison, variant, self.one[variant.key], self.ranks[variant.key], self.bounds[variant.key]
        )

    def _first(self, found: Mapping[str, Answer]) -> First | None:
        for variant in self.variants:
            key = "gradients" if variant.key == PLAIN else variant.key
            answer = found.get(key)
            if answer is not None and (finding := answer.finding) is not None and not finding.fine and finding.wrong:
                return self._first_of(key, variant, finding)
        return None

    def _first_of(self, key: str, variant: Variant, finding: Finding) -> First:
        one, ranks = self.one[variant.key], self.ranks[variant.key]
        expected = asked.ordered(one)
        names = list(dict.fromkeys(name for name in (*expected, *finding.wrong) if name in finding.wrong))
        within = max(PLAINLY, 3 * finding.bound if self.comparison.dtype != "float64" else 0.0)
        gradients = [ran.gradients for ran in ranks]
        found = cause(self.comparison, names[0], gradients, expected, within)
        losses = asked.joined(self.comparison, ranks)[0], asked.numbers(one.losses)[0]
        if found.kind in UNCLEAR:
            few = [{n: g for n, g in each.items() if n in finding.wrong} for each in gradients]
            found = self._guessed(variant, few, within) or of_losses(self.comparison, *losses) or found
        last = None
        if found.kind in UNCLEAR and len(names) > 1 and abs(losses[0] - losses[1]) <= within * abs(losses[1]):
            last = cause(self.comparison, names[-1], gradients, expected, within)
        lies = ranks[0].lies.get(names[0], "unknown")
        count = (len(finding.wrong), finding.count)
        return First(key, names[0], finding.wrong[names[0]], finding.bound, lies, found, count, names[-1], last)

    def _guessed(self, variant: Variant, ranks: Sequence[Mapping[str, Tensor]], within: float) -> Cause | None:
        done = self._call(_guess, self.comparison, variant, self.folder, world=1)
        if isinstance(done, str):
            return None
        if (match := guesses.matching(self._read("guesses"), ranks, within)) is None:
            return None
        guess, factor = match
        return Cause(guess.kind, guess.sentence, factor=factor)

    def _looked(self) -> tuple[Looked, list[Looked]] | None:
        """What modules got and returned in one process, and on each rank; None if the code raises an error."""
        for ranks, world in ((False, 1), (True, self.comparison.world)):
            if isinstance(self._call(_look, self.comparison, self.folder, ranks, world=world), str):
                return None
        return self._read("looked"), self._read_all("looked")

    def _rounding(self, exact: float) -> float:
        """How far activations may be apart: `exact` in float64."""
        return exact if self.comparison.dtype == "float64" else ROUNDED[self.comparison.dtype]

    def _read_all(self, name: str) -> list[Any]:
        """What each rank wrote under this name."""
        return [self._read(f"{name}-{rank}") for rank in range(self.comparison.world)]

    def _read(self, name: str) -> Any:
        """What our own ranks wrote, of any type: the folder is one that only this user can read."""
        return torch.load(self.folder / f"{name}.pt", weights_only=False)


def _explained(first: First, backward: Astray | None) -> First:
    """With the cause that the gradients of activations prove."""
    if backward is None or backward.cause is None:
        return first
    return attrs.evolve(first, cause=backward.cause, last_cause=first.last_cause and backward.cause)


@contextlib.contextmanager
def _quiet(comparison: Comparison, folder: Path) -> Iterator[None]:
    """Errors are noted in `folder`. What libraries warn of is left out: it comes from every rank, in every question.
    The files of the user's functions are imported first: a function inside of another arrives without its file."""
    with noted(folder), _as_under_torchrun(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in _modules(comparison):
            if module not in sys.modules:
                importlib.import_module(module)
        yield


def _modules(comparison: Comparison) -> list[str]:
    """Those of the user's functions."""
    named = {getattr(each, "__module__", "__main__") for each in (comparison.build, comparison.parallelize)}
    return sorted(named - {"__main__"})


@contextlib.contextmanager
def _as_under_torchrun(folder: Path) -> Iterator[None]:
    """Inside, the environment says which rank this is: Accelerate and others ask it, not the process group."""
    import torch.distributed as dist

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    port = str(20000 + zlib.crc32(folder.name.encode()) % 20000)  # the same on all ranks; the group is there already
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": folder.name}
    before = {key: os.environ.get(key) for key in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _one_process(comparison: Comparison, variants: Sequence[Variant], folder: Path) -> dict[str, Any]:
    with _quiet(comparison, folder):
        return {"model": type(comparison.build()).__name__, **asked.one_process(comparison, variants, folder)}


def _on_ranks(comparison: Comparison, variant: Variant, folder: Path) -> None:
    with _quiet(comparison, folder):
        asked.on_ranks(comparison, variant, folder)


def _guess(comparison: Comparison, variant: Variant, folder: Path) -> None:
    with _quiet(comparison, folder):
        values = torch.load(folder / "initial.pt", weights_only=True)
        torch.save(guesses.guesses(comparison, variant, values), folder / "guesses.pt")


def _look(comparison: Comparison, folder: Path, ranks: bool) -> None:
    import torch.distributed as dist

    with _quiet(comparison, folder):
        looking = Looking()
        values = torch.load(folder / "initial.pt", weights_only=True)
        if not ranks and comparison.dtype != "float64":
            comparison = attrs.evolve(comparison, dtype="float64", rounded=None)
            values = {name: value.double() for name, value in values.items()}
        run(comparison, Variant(PLAIN), values, ranks=ranks, look=looking.look)
        torch.save(looking.done(), folder / (f"looked-{dist.get_rank()}.pt" if ranks else "looked.pt"))


def _stuck(said: str) -> str:
    """Where each rank that hangs stands, by the stacks in `said`."""
    places = []
    for rank, stack in re.findall(r"^rank-(\d+):\n(.*?)(?=^rank-\d+:|\Z)", said, re.MULTILINE | re.DOTALL):
        frames = re.findall(r'File "([^"]+)", line (\d+)', stack)  # the innermost first
        own = [f"{file}:{line}" for file, line in frames if not LIBRARY.search(file)]
        places += [f"; rank {rank} at {own[0]}"] if own else []
    return "".join(places)


def _where(traceback: str) -> str:
    """The last line of the traceback that names a file, shortened."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip().startswith("File ")]
    own = [line for line in lines if "plait_testing" not in line]
    said = (own or lines or ["an unknown place"])[-1]
    return said.replace("File ", "").replace('"', "").replace(", line ", ":").partition(", in ")[0]
