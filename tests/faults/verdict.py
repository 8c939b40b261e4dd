"""What a scenario came to: bitwise equal, refused with a sentence, or a defect."""

import json
import re
import time
from pathlib import Path
from typing import Any

import attrs

from tests.faults.place import Ended, Sandbox, digests

EQUAL, REFUSED, DEFECT = "equal", "refused", "defect"
EXPECTED = {  # what may lie in a run's folder when no command runs
    "config.yaml", "versions.json", "mesh.json", "outcome.json", "metrics.jsonl", "metrics.old.jsonl", ".lock", ".host",
    "checkpoints", "export", "ranks",
}  # fmt: skip
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")
NOISE = re.compile(
    r"Traceback \(most recent call last\)|^Exception in thread|^Fatal Python error|terminate called", re.M
)
FEWER_ROWS = re.compile(r"metrics\.jsonl has only \d+ rows")


class Defect(Exception):
    """What must not happen, in words."""


@attrs.frozen
class Reference:
    """What the undisturbed run left. weights: digests of the exported files."""

    numbers: list[Any]
    weights: dict[str, str]


def result_of(run: Path, rows_may_lack: bool = False) -> Reference:
    """Raises Defect if there is no result. rows_may_lack: somebody removed metrics.jsonl, and the run said so."""
    path = run / "metrics.jsonl"
    try:
        lines = [] if rows_may_lack and not path.exists() else path.read_text().splitlines()
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise Defect(f"metrics.jsonl cannot be read: {error}") from None
    if not (run / "export").is_dir():
        raise Defect("the run says that it is done, but there are no exported weights")
    return Reference([[row.get(key) for key in NUMBERS] for row in rows], digests(run / "export"))


def equal(place: Sandbox, ended: Ended, reference: Reference) -> str:
    """The run is done and is bitwise the undisturbed one. Raises Defect."""
    if ended.code != 0:
        raise Defect(f"exit code {ended.code}: {ended.sentence or ended.text[-600:]}")
    clean(place, ended)
    fewer = FEWER_ROWS.search(ended.text) is not None
    found = result_of(place.run_folder, fewer)
    wanted = reference.numbers
    if fewer:
        wanted = wanted[len(wanted) - len(found.numbers) :]
    if found.numbers != wanted:
        raise Defect(_difference(found.numbers, wanted))
    if found.weights != reference.weights:
        raise Defect("the metrics are equal, but the final weights differ")
    return EQUAL


def refused(place: Sandbox, ended: Ended, *named: str) -> str:
    """It ended with one sentence and an exit code that is not 0. named: regular expressions, one of them matches."""
    if ended.code == 0:
        raise Defect(f"exit code 0, but the run should have been refused: {ended.text[-600:]}")
    said = [line for line in ended.text.splitlines() if line.startswith("plait: ")]
    if len(said) != 1:
        raise Defect(f"{len(said)} sentences instead of one: {ended.text[-1500:]}")
    if named and not any(re.search(one, said[0]) for one in named):
        raise Defect(f"the sentence does not name the cause ({' | '.join(named)}): {said[0]}")
    clean(place, ended)
    return REFUSED


def clean(place: Sandbox, *commands: Ended) -> None:
    """No traceback on the console, no process, no file left over. Raises Defect."""
    for ended in commands:
        quiet(ended)
    if left := left_running(place):
        raise Defect(f"{len(left)} process(es) left over")
    if left_files := sorted(path.name for path in place.tmp.iterdir()):
        raise Defect(f"left in the temporary folder: {', '.join(left_files[:5])}")
    if place.home.exists() and (at_home := sorted(path.name for path in place.home.iterdir())):
        raise Defect(f"left in the home folder: {', '.join(at_home[:5])}")
    folder = place.run_folder
    if folder.is_dir():
        odd = sorted(path.name for path in folder.iterdir() if path.name not in EXPECTED)
        odd += [p.name for p in (folder / "checkpoints").glob("*") if not re.fullmatch(r"step-\d+", p.name)]
        if odd:
            raise Defect(f"left in the run's folder: {', '.join(odd[:5])}")


def quiet(ended: Ended) -> None:
    if found := NOISE.search(ended.text):
        raise Defect(f"on the console: {ended.text[max(found.start() - 300, 0) :][:2500]}")


def left_running(place: Sandbox, seconds: float = 5.0) -> list[int]:
    """The processes that are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := place.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _difference(found: list[Any], wanted: list[Any]) -> str:
    steps = [row[0] for row in found]
    if steps != [row[0] for row in wanted]:
        return f"the steps are {_ranges(steps)} instead of 1 to {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        for key, a, b in zip(NUMBERS, one, other, strict=True):
            if a != b:
                return f"{key} of step {one[0]} is {a!r} instead of {b!r}"
    return "they differ"


def _ranges(steps: list[int]) -> str:
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(f"{a} to {b}" for a, b in runs)
