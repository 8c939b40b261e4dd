"""A cache of their own for the tests, and small corpora."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLAIT_CACHE", str(folder))
    return folder


@pytest.fixture
def said() -> list[str]:
    """What a source says: pass `said.append`."""
    return []


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """200 documents of unequal length in JSON lines, no two alike."""
    file = tmp_path / "corpus.jsonl"
    rows = [{"text": f"document {i}: " + f"{i * 7919 % 1000} " * (i % 13)} for i in range(200)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes | str], str]:
    """write(name, content): a file below the test's folder; returns its path."""

    def write(name: str, content: bytes | str) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(file)

    return write
