"""What a run does not use of the user's data, or uses changed: counted, and said in one line."""

from collections import Counter
from collections.abc import Mapping, Sequence

COMPRESSED = "left out {n} compressed file(s), which may repeat the plain ones beside them: a glob reads both"
EMPTY_FILES = "left out {n} empty file(s)"
NO_TEXT = "left out {n} row(s) without text"
HALF_PAIRS = "replaced half a surrogate pair by ? in {n} document(s)"
ENDS = "kept the token that ends documents in {n} place(s) inside of one; data.eod_token names another"
TAIL = "left out {n} tokens at the end, which fill no sample"


class LeftOut:
    """Counts what is left out. counts: a sentence with {n} for its count -> the count."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts: Counter[str] = Counter(counts or {})

    def add(self, what: str, count: int = 1) -> None:
        if count:
            self.counts[what] += count

    def line(self) -> str:
        """All of it in one line, in the order in which it was found; "" if nothing was left out."""
        return "; ".join(what.replace("{n}", f"{count:,}") for what, count in self.counts.items())


def some(names: Sequence[str]) -> str:
    """The first three names, for a line."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
