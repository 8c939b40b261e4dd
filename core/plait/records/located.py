"""Finds a run by its name."""

from pathlib import Path

from plait.contract.errors import PlaitError, near_miss

RUNS = Path("runs")  # where `plait train` makes them


def located(word: str, argument: str, fits: str) -> Path:
    """The path that `word` is, or that of the run with this name, runs/WORD.

    Raises PlaitError if there is none: it names runs that there are. argument: of a command, such as "RUN". fits: what
    `word` must be, in words.
    """
    path = Path(word).expanduser()
    if path.exists():
        return path
    if (RUNS / path).exists():
        return RUNS / path
    runs = sorted(each.name for each in RUNS.iterdir()) if RUNS.is_dir() else []
    here = f"; in {RUNS} there are {', '.join(runs)}{near_miss(word, runs)}" if runs else ""
    raise PlaitError(f"{word} is not there; it must be {fits}{here}").at(argument, word, fits=fits)
