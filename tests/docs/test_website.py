"""The pages that `make docs` makes a site of: each stands once in the index, by its kind, and links lead somewhere."""

from collections import Counter
from pathlib import Path

import pytest

from docs import website
from tests.docs.pages import ROOT

SITE = [page for page in website.reachable([ROOT / "README.md", website.INDEX]) if page.suffix == ".md"]
LINKING = sorted({*SITE, ROOT / "AGENTS.md", *ROOT.glob("plugins/*/README.md"), *ROOT.glob("examples/*/README.md")})


def test_each_page_stands_once_in_the_index_under_one_of_four_kinds() -> None:
    kinds = website.index()
    assert list(kinds) == ["Tutorials", "How-to guides", "Reference", "Explanation"]
    listed = Counter(page for pages in kinds.values() for _, page in pages)
    wanted = {*ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/README.md")} - {website.INDEX}
    assert sorted(wanted - set(listed)) == []
    assert [page for page, count in listed.items() if count > 1] == []


def test_titles_of_the_index_differ() -> None:
    titles = Counter(title for pages in website.index().values() for title, _ in pages)
    assert titles.most_common(1)[0][1] == 1


def test_links_and_anchors_lead_somewhere() -> None:
    assert len(LINKING) > 30
    assert [problem for page in LINKING for problem in website.broken(page)] == []


def test_inner_lists_are_indented_as_the_site_needs_it() -> None:
    """By four spaces: forges take two as well, the site's Markdown would make one list of both."""
    lines = [line for page in SITE for line in website.prose(page).splitlines()]
    assert [line for line in lines if line.startswith(("  - ", "  * ", "  1. "))] == []


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(website, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# Other\n\n## A `code` of two, or more\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-code-of-two-or-more) [b](other.md#b) [c](gone.md) [d](https://example.com/gone.md)\n"
        "```text\n[e](gone.md)\n```\n",
        encoding="utf-8",
    )
    assert website.broken(page) == [
        "page.md links other.md#b, which has no such heading",
        "page.md links gone.md, which is no file",
    ]


def test_a_linked_source_file_is_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(website, "ROOT", tmp_path)
    monkeypatch.setattr(website, "INDEX", tmp_path / "docs" / "README.md")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Home\n\nSee [the code](code.py).\n", encoding="utf-8")
    (tmp_path / "code.py").write_text("answer = 42\n", encoding="utf-8")
    website.INDEX.write_text("# Index\n", encoding="utf-8")
    website.stage(tmp_path / "pages")
    assert "[the code](code.py.md)" in (tmp_path / "pages" / "README.md").read_text(encoding="utf-8")
    assert "answer = 42" in (tmp_path / "pages" / "code.py.md").read_text(encoding="utf-8")
