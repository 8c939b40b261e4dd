"""Makes the site of Plait's pages, with a search: `make docs`, into build/docs/site.

Pages keep the paths that they have in the repository, so links between them stay as they are. A linked source file
becomes a page that shows it: the site needs no other address. What docs/README.md lists is the navigation.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import attrs
import yaml

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs" / "README.md"
BUILD = ROOT / "build" / "docs"
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1`*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<target>[^)#]+)\): ", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml"}

SETTINGS = {
    "site_name": "Plait",
    "site_description": "Parallel training strategies as plugins",
    "docs_dir": "pages",
    "site_dir": "site",
    "use_directory_urls": False,  # the site works as plain files
    "theme": {
        "name": "material",
        "font": False,  # nothing is fetched from elsewhere
        "features": ["navigation.tabs", "navigation.indexes", "navigation.top", "content.code.copy"],
        "palette": [
            {"media": "(prefers-color-scheme: light)", "scheme": "default"},
            {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
        ],
    },
    # No more than forges render too, so that a page looks alike on both.
    "markdown_extensions": [
        "tables",
        "sane_lists",
        "pymdownx.superfences",
        {"pymdownx.highlight": {"pygments_lang_class": True}},
        {"toc": {"permalink": True}},
    ],
}


class BrokenLinkError(ValueError):
    """A link of a page whose target the repository lacks."""


@attrs.frozen
class Link:
    page: Path
    target: str  # as the page has it

    @property
    def path(self) -> Path:
        name = unquote(self.target.partition("#")[0])
        return (self.page.parent / name).resolve() if name else self.page

    @property
    def anchor(self) -> str:
        return self.target.partition("#")[2]


def prose(page: Path) -> str:
    """The text without its code, line by line where it was."""
    return FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))


def links(page: Path) -> list[Link]:
    """The links to files of the repository, and to anchors."""
    return [Link(page, found) for found in LINK.findall(prose(page)) if not re.match(r"\w+:", found)]


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as forges and the site name them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?)\s*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        base = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        same = sum(1 for other in found if re.fullmatch(rf"{re.escape(base)}(_\d+)?", other))
        found.add(f"{base}_{same}" if same else base)
    return found


def broken(page: Path) -> list[str]:
    """A sentence for each link of the page that leads nowhere."""
    sentences = []
    for link in links(page):
        if not link.path.is_file():
            sentences.append(f"{page.relative_to(ROOT)} links {link.target}, which is no file")
        elif link.anchor and link.anchor not in anchors(link.path):
            sentences.append(f"{page.relative_to(ROOT)} links {link.target}, which has no such heading")
    return sentences


def index() -> dict[str, list[tuple[str, Path]]]:
    """Kind of page -> (title, page) in the order of docs/README.md."""
    kinds = {}
    for section in prose(INDEX).split("\n## ")[1:]:
        found = [(entry["title"], (INDEX.parent / entry["target"]).resolve()) for entry in ENTRY.finditer(section)]
        kinds[section.partition("\n")[0].strip()] = found
    return kinds


def reachable(start: list[Path]) -> list[Path]:
    """The files to which links lead from the start, these included; BrokenLinkError if a link leads nowhere."""
    found, left = dict.fromkeys(start), list(start)
    while left:
        page = left.pop()
        if page.suffix != ".md":
            continue
        if wrong := broken(page):
            raise BrokenLinkError("; ".join(wrong))
        new = [link.path for link in links(page) if link.path not in found]
        found.update(dict.fromkeys(new))
        left += new
    return list(found)


def is_shown(path: Path) -> bool:
    """Whether the site shows the file on a page made for it."""
    return path.suffix in LANGUAGES


def with_pages_for_code(page: Path) -> str:
    """The page's text, whose links to source files lead to the pages that show them."""
    text = page.read_text(encoding="utf-8")
    for link in links(page):
        if is_shown(link.path):
            text = text.replace(f"]({link.target})", f"]({link.target}.md)")
    return text


def stage(pages: Path) -> None:
    """Write what the generator reads: every page, picture and source file to which the index leads."""
    for path in reachable([ROOT / "README.md", INDEX]):
        place = pages / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            place.write_text(with_pages_for_code(path), encoding="utf-8")
        elif is_shown(path):
            code = path.read_text(encoding="utf-8")
            page = f"# {path.relative_to(ROOT)}\n\n````{LANGUAGES[path.suffix]}\n{code}````\n"
            place.with_name(f"{path.name}.md").write_text(page, encoding="utf-8")
        else:
            shutil.copy(path, place)


def settings() -> dict[str, object]:
    def name(path: Path) -> str:
        return path.relative_to(ROOT).as_posix()

    kinds = [{kind: [{title: name(page)} for title, page in pages]} for kind, pages in index().items()]
    return {**SETTINGS, "nav": [{"Plait": "README.md"}, {"All pages": name(INDEX)}, *kinds]}


def main() -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    try:
        stage(BUILD / "pages")
    except BrokenLinkError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    configuration = BUILD / "mkdocs.yml"
    configuration.write_text(yaml.safe_dump(settings(), sort_keys=False), encoding="utf-8")
    program = str(Path(sys.executable).with_name("zensical"))
    command = [program, "build", "--strict", "--config-file", str(configuration)]
    code = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "NO_COLOR": "1"}, check=False).returncode
    if code == 0:
        print(f"docs: the site is in {BUILD / 'site'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
