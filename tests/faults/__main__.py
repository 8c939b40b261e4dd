"""`make faults`: the campaign. Seeded and repeatable: faults befall real runs, and each comes to a verdict.

    python -m tests.faults [--count 1000] [--minutes M] [--seed 0] [--jobs 2] [--only KIND] [--scenario N ...]
                           [--anew] [--results FOLDER] [--write FILE] [--keep]

Scenario N of a seed is always the same; `--scenario N ...` runs these alone, with their folders kept. Results are kept
in a file, and the next call continues there if the code is the same.
"""

import argparse
import contextlib
import itertools
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults import changes, damage, hostile, kills, plugins, system
from tests.faults.kept import Kept
from tests.faults.report import faults_of, summary, write_page
from tests.faults.runner import Runner

# kind -> (how often, what happens). The shares decide how many scenarios are of a kind.
KINDS = {
    "ranks killed": (20, kills.ranks_killed),
    "launcher killed": (20, kills.launcher_killed),
    "killed at a named point": (80, kills.at_a_point),
    "signals": (50, kills.signalled),
    "told to stop at a named point": (10, kills.told_at_a_point),
    "stopped": (6, kills.frozen),
    "calls that fail": (40, system.failing_call),
    "full disks": (20, system.full_disk),
    "damaged files": (90, damage.damaged),
    "hostile files": (30, hostile.hostile),
    "misbehaving plugins": (25, plugins.misbehaving),
    "two at once": (6, changes.together),
    "a second start": (4, changes.while_training),
    "other settings": (15, changes.changed),
}
LAYOUTS = {"one process": 6, "fsdp2": 3, "tensor_parallel": 1}


def drawn(seed: int, only: str | None) -> Iterator[tuple[int, str, str]]:
    """(number, kind, layout), without end."""
    rng = random.Random(f"campaign {seed}")
    kinds = {name: share for name, (share, _) in KINDS.items() if only in (None, name)}
    number = 0
    while True:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        yield number, kind, rng.choices(list(LAYOUTS), list(LAYOUTS.values()))[0]
        number += 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many faults to plant")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no scenario after so long")
    parser.add_argument("--seed", type=int, default=0, help="decides every scenario")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios at once")
    parser.add_argument("--only", choices=list(KINDS), help="scenarios of this kind alone")
    parser.add_argument("--scenario", type=int, nargs="+", help="run these alone and keep their folders")
    parser.add_argument("--anew", action="store_true", help="forget the results so far")
    parser.add_argument("--results", type=Path, default=Path(".faults"), help="the folder in which results are kept")
    parser.add_argument("--write", type=Path, help="write the table to this page")
    parser.add_argument("--keep", action="store_true", help="keep the folders of scenarios that found a defect")
    options = parser.parse_args(argv)

    cases = drawn(options.seed, options.only)
    if options.scenario is not None:
        first = itertools.islice(cases, max(options.scenario) + 1)
        cases = iter([case for case in first if case[0] in options.scenario])
    root, since = Path(tempfile.mkdtemp(prefix="plait-faults-")), time.monotonic()
    name = f"seed-{options.seed}" + (f"-{options.only.replace(' ', '-')}" if options.only else "")
    folder = root if options.scenario is not None else options.results
    if options.anew:
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
    kept = Kept(folder / f"{name}.jsonl")
    if kept.results:
        print(f"continuing after {len(kept.results)} scenarios, which are in {kept.path}", flush=True)
    done = kept.numbers

    def more() -> bool:
        late = time.monotonic() - since > options.minutes * 60
        return not late and faults_of(kept.results) < options.count

    with (
        contextlib.suppress(KeyboardInterrupt),
        Runner(root, options.seed, options.jobs, {name: do for name, (_, do) in KINDS.items()}) as runner,
    ):
        for result in runner.run((case for case in cases if case[0] not in done), more):
            kept.add(result)
            print(result.line(faults_of(kept.results)), flush=True)
            if not result.defect and options.scenario is None:
                shutil.rmtree(result.folder, ignore_errors=True)
    print(summary(kept.results, kept.seconds))
    defects = [result for result in kept.results if result.defect]
    if options.write:
        write_page(options.write, kept.results, options.seed, kept.seconds)
    if not (defects and options.keep) and options.scenario is None:
        shutil.rmtree(root, ignore_errors=True)
    else:
        print(f"folders: {root}")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
