"""Results that outlive a campaign: a file with one line per scenario, so that a cut campaign continues."""

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import attrs

from tests.faults.report import Result

ROOT = Path(__file__).parents[2]
CODE = ("core", "conf", "plugins", "tests/faults", "tests/helpers", "pyproject.toml", "constraints.txt")
KINDS = {".py", ".yaml", ".toml", ".c", ".txt"}


@attrs.define
class Kept:
    """The file of one campaign. `results`: those of this code so far. `seconds`: how long they took, without pauses."""

    path: Path
    results: list[Result] = attrs.field(factory=list)
    seconds: float = 0.0
    _code: str = attrs.field(factory=lambda: code())
    _commit: str = attrs.field(factory=lambda: commit())
    _last: float = attrs.field(factory=time.monotonic)

    def __attrs_post_init__(self) -> None:
        rows = self._rows()
        count = [row for row in rows if row["code"] == self._code]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if len(count) < len(rows) or rows == []:
            if rows:
                self.path.replace(self.path.with_suffix(".old.jsonl"))
            self.path.write_text("".join(json.dumps(row) + "\n" for row in count))
        for row in count:
            self.results.append(_result(row["result"]))
            self.seconds += row["seconds"]

    def add(self, result: Result) -> None:
        """Count it, and write it down at once."""
        now = time.monotonic()
        body = attrs.asdict(attrs.evolve(result, commit=self._commit)) | {"folder": str(result.folder)}
        row = {"code": self._code, "seconds": round(now - self._last, 1), "result": body}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.results.append(_result(body))
        self.seconds += row["seconds"]
        self._last = now

    @property
    def numbers(self) -> set[int]:
        """The scenarios that are done."""
        return {result.number for result in self.results}

    def _rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        *lines, torn = self.path.read_text().split("\n")
        if torn:  # the machine ended while it was written
            self.path.write_text("".join(f"{line}\n" for line in lines))
        return [json.loads(line) for line in lines]


def _result(body: dict[str, Any]) -> Result:
    planted = [(fault, verdict) for fault, verdict in body["planted"]]
    return Result(**body | {"folder": Path(body["folder"]), "planted": planted})


def code() -> str:
    """A digest of all that decides what a scenario comes to. Documentation and other tests may change meanwhile."""
    found = hashlib.sha256()
    for name in CODE:
        folder = ROOT / name
        for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            if path.suffix in KINDS and path.is_file() and ".egg-info" not in str(path):
                found.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def commit() -> str:
    """The commit of the working tree, for people; `code` decides."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"
