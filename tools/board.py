"""Writes docs/board.md: `make board`.

Runs the conformance suites of all packages here, and joins their grades, with those of `make third-parties` if it ran,
to what `plait plugins --check --json` tells of every plugin. What was found under this torch is in
docs/board/TORCH.json; the page is made of all these files. `python -m tools.board FOLDER` takes the grades in FOLDER in
place of running suites; a plugin that has none there keeps its last one under this torch.
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.third_parties import GRADES, LIST, ROOT, listed


def suites() -> list[Path]:
    """The files of tests that have a suite."""
    files = {*ROOT.glob("plugins/*/tests/test_*.py"), *ROOT.glob("examples/*/tests/test_*.py")}
    files -= {*ROOT.glob("plugins/testing/**/*.py")}  # they test the suites
    return sorted(path for path in files if "Suite):" in path.read_text(encoding="utf-8"))


def run_suites(folder: Path) -> int:
    options = ("-m", "not gpu", "-n", "2", "--dist", "loadgroup", "--plait-grade", str(folder))
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, suites())], cwd=ROOT, check=False
    ).returncode


def joined(
    plugins: list[dict[str, Any]], grades: Path, sources: dict[str, str], before: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of `plait plugins --check --json`, each with its grade, or else that of `before`, or None; and if its
    package is one of others, with the address of that."""
    last = {(row["kind"], row["name"]): row["grade"] for row in before}
    found = {(told["kind"], told["name"]): told for told in map(read, sorted(grades.glob("*.suite.json")))}
    rows = []
    for row in plugins:
        key = (row["kind"], row["name"])
        grade = {part: found[key][part] for part in ("counts", "beside")} if key in found else last.get(key)
        told = {key: row[key] for key in ("name", "kind", "distribution", "version", "api", "state")}
        source = {"source": sources[row["distribution"]]} if row["distribution"] in sources else {}
        rows.append(told | source | {"grade": grade})
    return sorted(rows, key=lambda row: (row["kind"], row["name"]))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    grades = Path(arguments[0]) if arguments else GRADES
    failed = 0 if arguments else run_suites(grades)
    listing = [sys.executable, "-m", "plait", "plugins", "--check", "--json"]
    plugins = json.loads(subprocess.run(listing, capture_output=True, encoding="utf-8", check=False).stdout)
    for path in sorted(grades.glob("*.plugins.json")):
        plugins += read(path)
    torch = version("torch").partition("+")[0]
    path = ROOT / "docs" / "board" / f"{torch}.json"
    before = read(path)["plugins"] if path.exists() else []
    record = {"torch": torch, "plugins": joined(plugins, grades, {p.name: p.source for p in listed(LIST)}, before)}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "docs" / "generate.py"], check=True)
    print(f"board: {len(record['plugins'])} plugins under torch {torch} are in docs/board.md")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
