"""The conversations of JSON lines, and the files that keep their tokens."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from plait import PlaitError
from plait_data import row_formats
from plait_data.cache import Progress
from plait_data.documents import File, rows
from plait_data.order import digest64
from plait_data.row_formats import as_messages
from plait_data.template import ANSWERS, Conversation, Template
from plait_data.text_source import Say
from plait_data.unrendered import in_words, spelt_in_words, strange_roles, unread

FORMAT = 4  # of the files below; another version uses another cache
GROUP = 256  # conversations that the tokenizer gets at once, to spread over its threads
LEARNED = np.uint32(1 << 31)  # the bit of a stored id that says: to be learned
WIDTHS = {"tokens": "uint32", "lengths": "uint32", "answers": "uint32", "keys": "uint64"}


@attrs.frozen
class Tokens:
    """ids: of all conversations, one after the other, with the bit LEARNED. lengths: (n,) of each.

    answers: (n,) the place in each of the first token to learn. keys: (n,) digests of each one's content, which choose
    what is held out.
    """

    ids: np.ndarray
    lengths: np.ndarray
    answers: np.ndarray
    keys: np.ndarray


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What `write` wrote in `folder`; None if it is missing, or if a file's size has changed."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        whole = all(
            (folder / f"{name}.bin").stat().st_size == meta[name] * np.dtype(kind).itemsize
            for name, kind in WIDTHS.items()
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return meta if whole else None


def read(folder: Path) -> Tokens:
    if read_meta(folder) is None:
        raise PlaitError(f"the token cache {folder} is damaged or gone; run again to rebuild it")
    return Tokens(*(np.memmap(folder / f"{n}.bin", kind, mode="r").view(np.ndarray) for n, kind in WIDTHS.items()))


def write(files: list[File], key: str | None, template: Template, folder: Path, say: Say) -> None:
    """The tokens of all conversations with an answer into `folder`; last its `meta.json`.

    Raises PlaitError, naming file and line, for a row that is none, and if no conversation has an answer.
    """
    size = sum(file.size for file in files)
    say(f"tokenising {size / 1e6:,.1f} MB of conversations in {len(files):,} file{'s' * (len(files) != 1)}")
    progress, silent, kept = Progress(say, "tokenising", size), 0, TokenFiles(folder)
    others: Counter[str] = Counter()
    formats: Counter[str] = Counter()
    found = (one for file in files for one in conversations(file, key, others, formats))
    with kept:
        while group := list(islice(found, GROUP)):
            for ids, answers in template.encode([one for one, _ in group]):
                if not answers[1:].any():  # the first token has nothing to be predicted from
                    silent += 1
                    continue
                kept.add(ids, answers, digest64(ids.tobytes()))
            progress.add(sum(length for _, length in group))
    say(row_formats.in_words(formats))
    if not kept.lengths:
        roles = ", ".join(f"{role!r} of {count:,}" for role, count in sorted(template.roles.items()))
        raise PlaitError(
            f"{files[0].path}: no conversation has a message of the role {ANSWERS!r} to learn from; roles: {roles}"
        )
    kept.finish()
    without = f"; left out {silent:,} without an answer" if silent else ""
    say(f"{kept.tokens:,} tokens in {len(kept.lengths):,} conversations, {kept.learned:,} of them to learn{without}")
    for line in told(template, others):
        say(line)


class TokenFiles:
    """The files of `read` in `folder`, as they are written: one conversation after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokens, self.learned = folder, 0, 0
        self.lengths: list[int] = []
        self._answers: list[int] = []
        self._keys: list[int] = []
        self._out = (folder / "tokens.bin").open("wb")

    def __enter__(self) -> "TokenFiles":
        return self

    def __exit__(self, *error: Any) -> None:
        self._out.close()

    def add(self, ids: np.ndarray, answers: np.ndarray, key: int) -> None:
        """ids, answers: as the template encoded them, with one to learn behind the first at least. key: in `keys`."""
        self._out.write((ids | np.where(answers, LEARNED, np.uint32(0))).data)
        self.lengths.append(len(ids))
        self._answers.append(1 + int(answers[1:].argmax()))
        self._keys.append(key)
        self.tokens, self.learned = self.tokens + len(ids), self.learned + int(answers.sum())

    def finish(self) -> None:
        """Last of all, the file that says that all are there."""
        np.array(self.lengths, np.uint32).tofile(self.folder / "lengths.bin")
        np.array(self._answers, np.uint32).tofile(self.folder / "answers.bin")
        np.array(self._keys, np.uint64).tofile(self.folder / "keys.bin")
        rows = len(self.lengths)
        counts = {"tokens": self.tokens, "lengths": rows, "answers": rows, "keys": rows}
        (self.folder / "meta.json").write_text(json.dumps({"format": FORMAT, **counts}), encoding="utf-8")


def told(template: Template, others: Counter[str]) -> Iterator[str]:
    """What a user must know about what was encoded. others: the keys of rows that were not read."""
    yield from of_ends(template.ends, template.stops, template.name)
    lines = (
        unread(others),
        strange_roles(template.roles),
        in_words(template.unrendered),
        spelt_in_words(template.spelt),
    )
    yield from filter(None, lines)


def of_ends(ends: Counter[int | None], stops: list[str], name: Callable[[int], str]) -> Iterator[str]:
    """What a user must know about the tokens with which answers end; nothing if all end with a stop token."""
    known = ", ".join(stops) or "none"
    if missing := ends[None]:
        yield (
            f"{missing:,} of {ends.total():,} answers end without a special token: the template ends no turn there, so "
            f"the model does not learn to stop (tokens that stop an answer, by the tokenizer's folder: {known})"
        )
    others = sorted({name(number) for number in ends if number is not None} - {*stops})
    if others and stops:
        yield (
            f"answers end with {', '.join(others)}, which the tokenizer's folder does not name among the tokens that "
            f"stop an answer ({known}): this run's export names it; to generate with that folder itself, add it to "
            "eos_token_id in its generation_config.json"
        )


def conversations(
    file: File, key: str | None, others: Counter[str] | None = None, formats: Counter[str] | None = None
) -> Iterator[tuple[Conversation, int]]:
    """Each conversation of `file` with its bytes. key: as `data.messages_key`. others: counts the keys of rows that are
    not read. formats: counts rows by format.

    Raises PlaitError, naming file and line, for a row that is none.
    """
    for where, row, size in rows(file):
        read = as_messages(row, key, where)
        if others is not None:
            others.update(row.keys() - {*read.keys, "tools"})
        if formats is not None:
            formats[read.format] += 1
        yield Conversation(read.messages, row.get("tools") or None, where), size
