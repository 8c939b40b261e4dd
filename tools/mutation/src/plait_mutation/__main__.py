"""`make mutants`: plants random single-line bugs, and counts those that the quick tests notice.

    python -m plait_mutation [--count 300] [--seed 0] [--jobs 2] [--minutes M] [--file PART] [--again] [--repeats]
                             [--write PAGE]

First it records which tests run which lines, once per state of the source, and then new and changed tests only. Both
parts continue where a cut one stopped: their results are in the folder `.mutants`.
"""

import argparse
import hashlib
import json
import math
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from plait_mutation import page, recorded, repeats
from plait_mutation.draw import ROOT, Mutant, chosen, drawn, sources
from plait_mutation.judge import Copy, Verdict

FOLDER = ROOT / ".mutants"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="decides which")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after so long")
    parser.add_argument("--file", default="", help="only mutants of files whose path contains this")
    parser.add_argument("--again", action="store_true", help="survivors too: tests were added since")
    parser.add_argument("--repeats", action="store_true", help="add cases that only repeat others to tests/repeats.txt")
    parser.add_argument("--write", type=Path, help="write the table to this page")
    options = parser.parse_args(argv)

    folder = FOLDER / _digest()
    recorded.record(folder)
    tests = recorded.read(folder)
    sample = chosen((m for m in drawn(options.seed) if options.file in m.file), options.count)
    done = _known(folder / "verdicts.jsonl")
    if options.again:
        done = {name: verdict for name, verdict in done.items() if verdict.caught}
    left = [mutant for mutant in sample if mutant.name not in done]
    print(f"{len(sample)} mutants, {len(sample) - len(left)} judged before, {len(tests)} tests", flush=True)
    for mutant, verdict in _judged(left, tests, options.jobs, options.minutes):
        done[mutant.name] = verdict
        with (folder / "verdicts.jsonl").open("a") as file:
            file.write(json.dumps([mutant.name, verdict.caught, verdict.tests, verdict.seconds]) + "\n")
        said = f"caught by {verdict.caught}" if verdict.caught else f"SURVIVED {verdict.tests} tests"
        print(f"{len(done):4} {mutant.name}, line {mutant.lines[0]}: {said}, {verdict.seconds:.0f} s", flush=True)
    found = [(mutant, done[mutant.name]) for mutant in sample if mutant.name in done]
    print(page.summary(found))
    if options.repeats:
        repeats.write(
            repeats.LIST, repeats.repeats(tests, {verdict.caught for verdict in done.values() if verdict.caught})
        )
    if options.write:
        page.write(options.write, found, options.seed, _git("rev-parse", "--short", "HEAD"))
    return 0


def _judged(
    mutants: list[Mutant], tests: list[recorded.Recorded], jobs: int, minutes: float
) -> Iterator[tuple[Mutant, Verdict]]:
    until = time.monotonic() + minutes * 60
    with tempfile.TemporaryDirectory(prefix="plait-mutants-") as scratch, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Copy] = queue.Queue()
        for i in range(jobs):
            copies.put(Copy(Path(scratch) / str(i)))

        def judge(mutant: Mutant) -> tuple[Mutant, Verdict] | None:
            if time.monotonic() > until:
                return None
            copy = copies.get()
            try:
                return mutant, copy.judge(mutant, recorded.tests_for(mutant, tests))
            finally:
                copies.put(copy)

        try:
            for future in as_completed([pool.submit(judge, mutant) for mutant in mutants]):
                if (found := future.result()) is not None:
                    yield found
        finally:
            pool.shutdown(cancel_futures=True)  # an error is told now, not after all mutants


def _known(file: Path) -> dict[str, Verdict]:
    rows: list[Any] = [json.loads(line) for line in file.open()] if file.exists() else []
    return {name: Verdict(caught, count, seconds) for name, caught, count, seconds in rows}


def _digest() -> str:
    """Of all source that mutants are drawn from."""
    texts = [f"{file}\n{(ROOT / file).read_text()}" for file in sources(ROOT)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
