"""The documents in the files of a corpus: text files, JSON lines, JSON arrays and parquet."""

import codecs
import glob
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import attrs

from plait import PlaitError, near_miss
from plait.host import reading
from plait_data.left_out import COMPRESSED, EMPTY_FILES, HALF_PAIRS, NO_TEXT, LeftOut, some
from plait_data.opened import MARK, inner_suffix, opened, strange
from plait_data.walk import hidden, matches, walk

LINES = (".jsonl", ".json", ".ndjson")
PARQUET = (".parquet", ".pq")
PIECE = 1 << 18  # bytes; a longer text file is read in pieces, so that a corpus in one file needs little memory
BEFORE_ITEM = re.compile(r"\s*\[\s*"), re.compile(r"\s*,\s*")  # the first of a JSON array, and each other one
END = re.compile(r"\s*(\[\s*)?\]\s*\Z")  # of an array, also of an empty one


@attrs.frozen
class File:
    """kind: "text", "lines" or "parquet". named: the user named this file, so it must be readable as its kind.

    mtime_ns, ctime_ns, inode: the system's; of these a program can set only the first.
    """

    path: Path
    kind: str
    size: int
    mtime_ns: int
    named: bool
    ctime_ns: int = 0
    inode: int = 0


@attrs.frozen
class TextPiece:
    """A part of a document in UTF-8. read: bytes of the file that were read for it, for progress."""

    text: bytes
    first: bool
    last: bool
    read: int


def kind_of(path: Path) -> str:
    suffix = inner_suffix(path)[0]
    return "lines" if suffix in LINES else "parquet" if suffix in PARQUET else "text"


def entry(path: Path, named: bool) -> File:
    status = path.stat()
    stamps = status.st_mtime_ns, named, status.st_ctime_ns, status.st_ino
    return File(path, kind_of(path), status.st_size, *stamps)


def find(path: str, follow_links: bool = False) -> tuple[list[File], str]:
    """The non-empty files of a file, a folder (recursive, without hidden names) or a glob, sorted by name.

    Links that lead out of the folder, or of the one in which a glob begins, are left out unless `follow_links`; what
    is left out is returned too, in words. Raises PlaitError if there is no file.
    """
    with reading(path, "data.path"):
        return _find(path, follow_links)


def _find(path: str, follow_links: bool) -> tuple[list[File], str]:
    if "://" in path:
        raise PlaitError(
            f"data.path={path} is an address, and files are read from a folder: copy them to one, or stream them from "
            f"there with data=hf data.name=json 'data.data_files={path}'"
        ).at("data.path", path, fits="a file, a folder or a glob")
    given = Path(path).expanduser()
    left: list[Path] = []
    try:
        if given.is_dir():
            found = [entry(file, named=False) for file in walk(given, hidden, follow_links, left)]
            what = "the folder holds no files"
        elif given.exists():
            found, what = [_named(given, path)], ""
        elif glob.has_magic(path):
            found = [entry(match, named=False) for match in matches(given, follow_links, left)]
            what = "no file matches"
        else:
            there = [one.name for one in given.parent.iterdir()] if given.parent.is_dir() else []
            raise PlaitError(f"data.path={path} does not exist{near_miss(given.name, there)}").at(
                "data.path", path, fits=there
            )
    except ValueError as error:  # a name with a zero byte
        raise PlaitError(f"data.path={path!r} cannot be read: {error}").at("data.path", path) from error
    names = some([link.name for link in left])
    links = f"left out {len(left)} link(s) that lead out of the folder: {names}; data.follow_links=true reads them"
    if not found:
        raise PlaitError(f"data.path={path}: {what}{f', and Plait {links}' if left else ''}").at("data.path", path)
    files = [file for file in found if file.size]
    if not files:
        raise PlaitError(
            f"data.path={path}: {'the file is' if len(found) == 1 else f'all {len(found)} files are'} empty"
        ).at("data.path", path)
    lost = LeftOut({links: 1} if left else {})
    lost.add(EMPTY_FILES, len(found) - len(files))
    kept = files if not given.is_dir() else _without_repeats(files)
    lost.add(COMPRESSED, len(files) - len(kept))
    return kept, lost.line()


def _without_repeats(files: list[File]) -> list[File]:
    """The files, without compressed ones that stand beside plain ones of their kind: people unpack and keep both."""
    inner = [inner_suffix(file.path) for file in files]
    plain = {suffix for suffix, packed in inner if not packed}
    return [file for file, (suffix, packed) in zip(files, inner, strict=True) if not packed or suffix not in plain]


def _named(given: Path, path: str) -> File:
    if not given.is_file():
        raise PlaitError(f"data.path={path} is neither a file nor a folder, but a device, a pipe or a socket").at(
            "data.path", path, fits="a file or a folder"
        )
    return entry(given, named=True)


def probe(file: File, text_key: str) -> None:
    """Raise PlaitError if the beginning of `file` shows that it cannot be read; cheap."""
    if not os.access(file.path, os.R_OK):
        raise PlaitError(f"{file.path} cannot be read: permission denied")
    if file.kind != "text":
        next(pieces(file, text_key), None)


def pieces(file: File, text_key: str, lost: LeftOut | None = None) -> Iterator[TextPiece]:
    """The documents of `file`, in pieces. Raises PlaitError, naming file and line, for an invalid one.

    lost: counts what of it is no document.
    """
    lost = LeftOut() if lost is None else lost
    if file.kind == "text":
        return _text(file, lost)
    return _lines(file, text_key, lost) if file.kind == "lines" else _parquet(file, text_key, lost)


def _text(file: File, lost: LeftOut) -> Iterator[TextPiece]:
    with opened(file.path) as source:
        handle, done = source.content, 0

        def read() -> int:
            nonlocal done
            before, done = done, source.position()
            return done - before

        rest, first = handle.read(PIECE), True
        while more := handle.read(PIECE):
            cut = _border(rest)
            yield TextPiece(rest[:cut], first, False, read())
            rest, first = rest[cut:] + more, False
        if rest:
            yield TextPiece(rest, first, True, read())
        else:
            lost.add(EMPTY_FILES)


def _border(block: bytes) -> int:
    """Where to cut: after the last line, or else before the last character, which may be incomplete."""
    line = block.rfind(b"\n") + 1
    if line:
        return line
    at = len(block) - 1
    while at > 0 and block[at] & 0xC0 == 0x80:
        at -= 1
    return at or len(block)


def _lines(file: File, text_key: str, lost: LeftOut) -> Iterator[TextPiece]:
    for where, row, read in rows(file):
        value = row.get(text_key)
        if value or text_key not in row:
            yield TextPiece(encode(value, row, text_key, where, lost), True, True, read)
        elif value is None or value == "":
            lost.add(NO_TEXT)
        else:
            encode(value, row, text_key, where)  # raises: 0, false or an empty list is not text


def rows(file: File) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(file and place in words, the object, its bytes) of each line of JSON lines, or of each item of a JSON array.
    Raises PlaitError that names both."""
    with opened(file.path) as source:
        if what := strange(file.path, source.head):
            raise PlaitError(f"{file.path} is {what}, and JSON lines are read in UTF-8: convert it")
        listed = source.head.removeprefix(MARK).lstrip().startswith(b"[")
        kind, done = "item" if listed else "line", 0
        for number, row in (_items if listed else _rows)(file.path, source.content):
            where = f"{file.path}, {kind} {number}"
            if not isinstance(row, dict):
                given = type(row).__name__
                raise PlaitError(f"{where}: each {kind} must be a JSON object, but this is of type {given}")
            before, done = done, source.position()
            yield where, row, done - before


def _rows(path: Path, content: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """(number, value) of each line that is not empty."""
    for number, line in enumerate(content, 1):
        if line.strip():
            try:
                yield number, json.loads(line.rstrip())
            except ValueError as error:
                reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise PlaitError(
                    f"{path}, line {number}: each line must be a JSON object, but this one is not: {reason}"
                ) from error


def _items(path: Path, content: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """(number, value) of each item of a JSON array, of which a part is in memory at a time."""
    reader, decode, number, text, at = codecs.getreader("utf-8")(content), json.JSONDecoder().raw_decode, 1, "", 0
    while True:
        before = BEFORE_ITEM[number > 1].match(text, at)
        try:
            item, end = decode(text, before.end() if before else len(text))
        except ValueError as error:  # perhaps because the rest is not read yet
            apart = before is not None or text[at : at + 64].strip()[:1] in ("", "]")  # else more text helps nothing
            try:
                more = reader.read(max(PIECE, len(text) - at)) if apart else ""
            except ValueError as wrong:
                raise PlaitError(f"{path}, item {number}: {wrong}") from wrong
            if not more and END.match(text, at):
                return
            if not more:
                raise PlaitError(f"{path}, item {number}: the JSON array is damaged or cut here") from error
            text, at = text[at:] + more, 0
            continue
        yield number, item
        number, at = number + 1, end


def encode(value: Any, row: dict[str, Any], text_key: str, where: str, lost: LeftOut | None = None) -> bytes:
    """The document `row[text_key]` in UTF-8. Raises PlaitError, naming the row's keys, if it is not text."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:  # JSON can contain half a surrogate pair
            if lost is not None:
                lost.add(HALF_PAIRS)
            return value.encode("utf-8", "replace")
    if text_key in row:
        raise PlaitError(f"{where}: data.text_key={text_key} holds {type(value).__name__}, not text").at(
            "data.text_key", text_key
        )
    raise no_key(where, text_key, list(row))


def no_key(where: str, text_key: str, keys: list[str]) -> PlaitError:
    known = f"{', '.join(keys) or 'none'}{near_miss(text_key, keys)}"
    sentence = f"{where}: there is no data.text_key={text_key}; available: {known}"
    return PlaitError(sentence).at("data.text_key", text_key, fits=keys)


def _parquet(file: File, text_key: str, lost: LeftOut) -> Iterator[TextPiece]:
    import pyarrow as pa
    from pyarrow import parquet

    if packed := inner_suffix(file.path)[1]:
        raise PlaitError(f"{file.path}: parquet is compressed inside of its files; take the file out of its {packed}")
    try:
        with parquet.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            if text_key not in names:
                raise no_key(str(file.path), text_key, names)
            share = file.size / max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=256, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    text = b"" if value is None else encode(value, {text_key: value}, text_key, str(file.path))
                    if text:
                        yield TextPiece(text, True, True, int(share))
                    else:
                        lost.add(NO_TEXT)
    except (pa.ArrowException, OSError) as error:
        raise PlaitError(f"{file.path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
