"""`make faults`: the campaign. Seeded and repeatable: faults befall real runs, and each comes to a verdict.

    python -m tests.faults [--several] [--count 1000] [--minutes M] [--seed 0] [--jobs 2] [--only KIND]
                           [--once KIND ...] [--scenario N ...] [--anew] [--results FOLDER] [--write FILE] [--keep]

--several: on two to four machines, and 200 faults. Scenario N of a seed is always the same; `--scenario N ...` runs
these alone, with their folders kept. Results are kept in a file, and the next call continues there if the code is the
same.
"""

import argparse
import contextlib
import itertools
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as a command sets it, before the imports below import torch

from tests.faults import changes, damage, hostile, kills, plugins, system
from tests.faults.kept import Kept
from tests.faults.report import ALONE, SEVERAL, faults_of, summary, write_page
from tests.faults.runner import Runner
from tests.faults.scenario import Scenario
from tests.faults.several import campaign as several
from tests.helpers.machines import why_not

Kinds = Mapping[str, tuple[int, Callable[[Scenario], None]]]

# kind -> (how often, what happens). The shares decide how many scenarios are of a kind.
KINDS: Kinds = {
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


def drawn(
    seed: int, only: str | None, table: Kinds = KINDS, layouts: Mapping[str, int] = LAYOUTS
) -> Iterator[tuple[int, str, str]]:
    """(number, kind, layout), without end."""
    rng = random.Random(f"campaign {seed}")
    kinds = {name: share for name, (share, _) in table.items() if only in (None, name)}
    number = 0
    while True:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        yield number, kind, rng.choices(list(layouts), list(layouts.values()))[0]
        number += 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--several", action="store_true", help="on several machines")
    parser.add_argument("--count", type=int, help="how many faults to plant: 1000, or 200 on several machines")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no scenario after so long")
    parser.add_argument("--seed", type=int, default=0, help="decides every scenario")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios at once")
    parser.add_argument("--only", choices=[*KINDS, *several.KINDS], help="scenarios of this kind alone")
    parser.add_argument("--once", nargs="+", choices=several.KINDS, help="a quick scenario of each, on two machines")
    parser.add_argument("--scenario", type=int, nargs="+", help="run these alone and keep their folders")
    parser.add_argument("--anew", action="store_true", help="forget the results so far")
    parser.add_argument("--results", type=Path, default=Path(".faults"), help="the folder in which results are kept")
    parser.add_argument("--write", type=Path, help="write the table to this page")
    parser.add_argument("--keep", action="store_true", help="keep the folders of scenarios that found a defect")
    options = parser.parse_args(argv)

    if options.several and (reason := why_not()):
        print(f"not run: {reason}")
        return 0
    kinds, layouts = (several.KINDS, several.LAYOUTS) if options.several else (KINDS, LAYOUTS)
    count = options.count or (200 if options.several else 1000)
    cases = drawn(options.seed, options.only, kinds, layouts)
    if options.once:
        cases = ((number, kind, next(iter(layouts))) for number, kind in enumerate(options.once))
    if options.scenario is not None:
        first = itertools.islice(cases, max(options.scenario) + 1)
        cases = iter([case for case in first if case[0] in options.scenario])
    root, since = Path(tempfile.mkdtemp(prefix="plait-faults-")), time.monotonic()
    befalls = {name: do for name, (_, do) in kinds.items()}
    name = f"{'several-' * options.several}seed-{options.seed}" + (
        f"-{options.only.replace(' ', '-')}" if options.only else ""
    )
    folder = root if options.scenario is not None else options.results
    if options.anew:
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
    kept = Kept(folder / f"{name}.jsonl")
    if kept.results:
        print(f"continuing after {len(kept.results)} scenarios, which are in {kept.path}", flush=True)
    done = kept.numbers

    def more() -> bool:
        late = time.monotonic() - since > options.minutes * 60
        return not late and faults_of(kept.results) < count

    with (
        contextlib.suppress(KeyboardInterrupt),
        Runner(root, options.seed, options.jobs, befalls, bool(options.once)) as runner,
    ):
        for result in runner.run((case for case in cases if case[0] not in done), more):
            kept.add(result)
            print(result.line(faults_of(kept.results)), flush=True)
            if not result.defect and options.scenario is None:
                shutil.rmtree(result.folder, ignore_errors=True)
    print(summary(kept.results, kept.seconds))
    defects = [result for result in kept.results if result.defect]
    if options.write:
        mark = SEVERAL if options.several else ALONE
        write_page(options.write, kept.results, options.seed, kept.seconds, mark)
    if not (defects and options.keep) and options.scenario is None:
        shutil.rmtree(root, ignore_errors=True)
    else:
        print(f"folders: {root}")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
