"""JSON arrays: files of one list of objects, in place of an object per line."""

import gzip
import json

import pytest

from plait import PlaitError
from plait_data import documents
from plait_data.documents import entry, rows

ITEMS = [{"text": f"{number} ü {'x' * (number % 90)}", "more": [{}, ["]"]]} for number in range(40)]


@pytest.mark.parametrize("piece", [1, 7, 1 << 18])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_gives_what_lines_give(tmp_path, monkeypatch, piece, indent):
    """However the file is cut into pieces: also within a character, a key or a string."""
    monkeypatch.setattr(documents, "PIECE", piece)
    listed, lines = tmp_path / "a.json.gz", tmp_path / "a.jsonl"
    listed.write_bytes(
        gzip.compress(b"\xef\xbb\xbf \n" + json.dumps(ITEMS, ensure_ascii=False, indent=indent).encode())
    )
    lines.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    found = list(rows(entry(listed, named=True)))
    assert [row for _, row, _ in found] == [row for _, row, _ in rows(entry(lines, named=True))] == ITEMS
    assert found[2][0] == f"{listed}, item 3"
    assert sum(read for _, _, read in found) <= listed.stat().st_size


REFUSED = {
    '[{"text": "a"}, {"text": ': "item 2: the JSON array is damaged or cut here",
    '[{"text": "a"} {"text": "b"}]': "item 2: the JSON array is damaged or cut here",
    '[{"text": "a"},]': "item 2: the JSON array is damaged or cut here",
    '[{"text": "a"}] {}': "item 2: the JSON array is damaged or cut here",
    '[["text"]]': "item 1: each item must be a JSON object, but this is of type list",
    '[{"text": "\udcff"}]': "item 1: 'utf-8' codec",
}


@pytest.mark.parametrize("content", REFUSED)
def test_a_damaged_array_is_refused_with_its_item(tmp_path, content):
    file = tmp_path / "a.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(PlaitError) as error:
        list(rows(entry(file, named=True)))
    assert REFUSED[content] in str(error.value)


def test_an_empty_array_has_no_rows(tmp_path):
    (tmp_path / "a.json").write_text(" [ ]\n")
    assert not list(rows(entry(tmp_path / "a.json", named=True)))
