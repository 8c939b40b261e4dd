"""What README and docs/ tell a reader to type works: their scripts, and their `plait` commands."""

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, run, steps, write_files

TEXT = "\n".join(f"line {i} of a book that is long enough to train on" for i in range(4000))
FILES = {"book.txt": TEXT, "corpus/a.py": TEXT, "rows.jsonl": '{"body": "' + "a row of text, " * 9000 + '"}\n'}
OWN_TEST = {"own-loop.md"}
LACKS = {"object-stores.md", "preferences.md"}  # a bucket, the folder of a model


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in OWN_TEST | LACKS and steps(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_what_a_page_says_works(page: Path, tmp_path: Path) -> None:
    for name, text in FILES.items():  # what a reader is taken to have
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    write_files(page, tmp_path)
    for step in steps(page):
        run(step, tmp_path)
