"""`make grid`: every family of decoders of transformers under strategies, against one process; the README's table.

python plugins/transformers/tests/grid.py [FAMILY ...] [--write PAGE] [--transformers VERSION]

With families, only their rows of the page change, and the page says which day they are of. `--transformers 5.24.0`, or
anything else that pip takes, runs it with that transformers, and says which families end otherwise than in the table.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).parent))  # here and in the ranks
import families
import releases

from plait import PlaitError
from plait_testing.pool import Pool, RankError

UNDER: dict[str, dict[str, Any]] = {
    "ddp": {"ddp": {}},
    "fsdp2": {"fsdp2": {}},
    "simplefsdp": {"simplefsdp": {}},
    "tensor_parallel": {"tensor_parallel": {"degree": 2}},
    "expert_parallel": {"fsdp2": {}, "expert_parallel": {"degree": 2}},
}
WHOLE_ROWS = {"tensor_parallel": {"tensor_parallel": {"degree": 2, "sequence_parallel": False}}}  # after a refusal
BOUND = 1e-10  # of a gradient's size
PARTS = {  # strategy -> logical axis -> what it divides
    "tensor_parallel": {"heads": "attention", "mixer_heads": "mixers", "ffn": "feed-forward", "vocab": "vocabulary"},
    "expert_parallel": {"experts": "experts"},
}
BEGIN, END = "<!-- the grid: written by `make grid` -->", "<!-- the end of the grid -->"
PAGE = Path(__file__).parents[1] / "README.md"


@attrs.frozen
class Outcome:
    """said: how it ended, for the table. error: of the worst gradient, if it trained. note: the sentence, if not."""

    said: str
    error: float = 0.0
    note: str = ""


def kinds() -> list[str]:
    """All families of transformers that predict the next token."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    return sorted(kind for kind in CONFIG_MAPPING if CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING)


def on_rank(kind: str, strategies: dict[str, Any]) -> Any:
    """(result, logical axes of the parameters); the sentence of a refusal."""
    try:
        spec = families.OfFamily(kind=kind).build().spec()
        found = families.result(kind, strategies)
        return found, {fqn: spec.names_of(fqn) for fqn in found.initial}
    except PlaitError as error:
        return str(error)


def tried(pool: Pool, kind: str, strategies: dict[str, Any], world: int) -> list[Any] | str:
    """What the ranks answer; a sentence if they do not all train."""
    try:
        answers = pool.run(on_rank, kind, strategies, world=world, timeout=120)
    except RankError as error:
        return "fails: " + str(error).splitlines()[0].partition(": ")[2]
    return next((f"refused: {answer}" for answer in answers if isinstance(answer, str)), answers)


def outcomes(pool: Pool, kind: str) -> dict[str, Outcome]:
    """By strategy, or only "" for a family that does not train in one process."""
    alone = tried(pool, kind, {}, 1)
    if isinstance(alone, str):
        return {"": Outcome("not trained", note=alone.removeprefix("refused: "))}
    found = {}
    for name, strategies in UNDER.items():
        answers, beside = tried(pool, kind, strategies, 2), ""
        if isinstance(answers, str) and answers.startswith("refused") and name in WHOLE_ROWS:
            again = tried(pool, kind, WHOLE_ROWS[name], 2)
            answers, beside = (answers, "") if isinstance(again, str) else (again, "; sequence_parallel=false")
        if "finds no experts" in answers:
            found[name] = Outcome("no experts")
            continue
        if isinstance(answers, str):
            how, _, note = answers.partition(": ")
            found[name] = Outcome(how, note=note)
            continue
        error, where = max(families.apart(result, alone[0][0]) for result, _ in answers)
        divided = _divided(answers[0], PARTS[name]) if name in PARTS else ""
        found[name] = Outcome(f"exact{divided}{beside}", error) if error <= BOUND else Outcome("WRONG", error, where)
    return found


def _divided(answer: Any, parts: Mapping[str, str]) -> str:
    result, axes = answer
    shared = {axis for fqn, lies in result.placements.items() if re.search(r"\bS\w*\(", lies) for axis in axes[fqn]}
    return f"; {', '.join(what for axis, what in parts.items() if axis in shared) or 'nothing'} divided"


def table(found: Mapping[str, Mapping[str, Outcome]], worst: float = 0.0, days: Mapping[str, str] | None = None) -> str:
    """Families with the same outcome share a row; sentences follow, each once.

    worst: the worst error of outcomes that a page told. days: family -> when it was measured, if not all are of today.
    """
    by_day: dict[str, list[str]] = {}
    for kind in found:
        by_day.setdefault((days or {}).get(kind, str(date.today())), []).append(kind)
    oldest, *later = sorted(by_day)
    rows: dict[tuple[str, ...], list[str]] = {}
    notes: dict[str, list[str]] = {}
    for kind, by_strategy in found.items():
        if "" in by_strategy:
            notes.setdefault(of_any(by_strategy[""].note, kind), []).append(kind)
            continue
        cells = []
        for name in UNDER:
            one = by_strategy[name]
            cells.append(one.said)
            if one.note:
                notes.setdefault(f"{name}: {of_any(one.note, kind)}", []).append(kind)
        rows.setdefault(tuple(cells), []).append(kind)
    trained = [one for by in found.values() for one in by.values() if one.said.startswith("exact")]
    lines = [
        f"{oldest}, transformers {version('transformers')}, torch {version('torch')}: {len(found)} families, "
        f"{sum(map(len, rows.values()))} of them train; the worst gradient that counts as exact is off by "
        f"{max((worst, *(one.error for one in trained))):.1e}.",
        *(f"Measured on {day}: {', '.join(by_day[day])}." for day in later),
        "",
        f"| families | {' | '.join(UNDER)} |",
        f"|---{'|---' * len(UNDER)}|",
    ]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in sorted(rows.items(), key=_size)]
    lines += ["", "Why others do not train, or not under a strategy:", ""]
    lines += [f"- {', '.join(names)}: {note}" for note, names in sorted(notes.items(), key=_size)]
    return "\n".join(lines)


def told(page: Path) -> dict[str, dict[str, str]]:
    """Family -> strategy -> how it ended, as the table in `page` says; nothing beside an installed package."""
    if not page.exists():
        return {}
    inside = page.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in inside.splitlines() if line.startswith("| ")]
    if not lines:
        return {}
    (_, *names), *found = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
    return {kind: dict(zip(names, cells, strict=True)) for kinds, *cells in found for kind in kinds.split(", ")}


def read(page: Path) -> tuple[dict[str, dict[str, Outcome]], float, dict[str, str]]:
    """What the table in `page` says: the outcomes, the worst error, the day of each family's row."""
    inside = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found = {kind: {name: Outcome(said) for name, said in by.items()} for kind, by in told(page).items()}
    for line in (line for line in inside.splitlines() if line.startswith("- ")):
        names, _, note = line.removeprefix("- ").partition(": ")
        strategy, _, why = note.partition(": ")
        for kind in names.split(", "):
            if kind in found and strategy in found[kind]:
                found[kind][strategy] = attrs.evolve(found[kind][strategy], note=why)
            else:
                found[kind] = {"": Outcome("not trained", note=note)}
    worst = re.search(r"off by (\S+)\.$", inside, re.MULTILINE)
    first = re.search(r"^\d{4}-\d\d-\d\d", inside, re.MULTILINE)
    days = dict.fromkeys(found, first[0] if first else "")
    for day, names in re.findall(r"^Measured on (\S+): (.*)\.$", inside, re.MULTILINE):
        days |= dict.fromkeys(names.split(", "), day)
    return found, float(worst[1]) if worst else 0.0, days


def merged(page: Path, new: Mapping[str, Mapping[str, Outcome]]) -> str:
    """The table of `page`, with `new` rows in the place of those of the same families."""
    old, worst, days = read(page)
    days |= dict.fromkeys(new, str(date.today()))
    both = {kind: {**old, **new}[kind] for kind in sorted({**old, **new})}
    return table(both, worst, days)


def of_any(sentence: str, kind: str) -> str:
    return re.sub(rf"\b{re.escape(kind)}\b", "FAMILY", sentence)


def _size(row: tuple[Any, list[str]]) -> tuple[int, str]:
    return -len(row[1]), row[1][0]


def write(page: Path, text: str) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make grid", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help="only these")
    parser.add_argument("--write", type=Path, help="the page that gets the table")
    parser.add_argument("--transformers", metavar="VERSION", help="with this one, or with what pip takes by this name")
    parser.add_argument("--beside-the-page", action="store_true", help=argparse.SUPPRESS)  # with that transformers
    options = parser.parse_args()
    if options.transformers:
        page = [f"--write={options.write}"] if options.write else []
        return releases.again_with(options.transformers, [*options.families, *page])
    writes = options.write if not options.beside_the_page else None
    pool, found = Pool(2), dict[str, dict[str, Outcome]]()
    try:
        for kind in options.families or kinds():
            found[kind] = outcomes(pool, kind)
            if writes and options.families:
                write(writes, merged(writes, {kind: found[kind]}))
            print(f"{kind}: {', '.join(f'{n} {o.said}'.strip() for n, o in found[kind].items())}", flush=True)
    finally:
        pool.close()
    if options.beside_the_page:
        lines = releases.changed(read(PAGE)[0], found, version("transformers"))
        print("\n" + "\n".join(lines))
        if options.write:
            releases.write(options.write, lines)
    else:
        print(f"\n{table(found)}")
        if writes and not options.families:
            write(writes, table(found))
    return any(one.said == "WRONG" for by_strategy in found.values() for one in by_strategy.values())


if __name__ == "__main__":
    sys.exit(main())
