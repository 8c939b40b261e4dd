"""Damage to any file that a run wrote: the next start goes on and ends equal, or refuses and touches nothing."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.faults.place import SHORT, digests
from tests.faults.scenario import Defect, Scenario
from tests.faults.verdict import refused

Way = Callable[[Path, random.Random, list[Path]], object]

# By a start that refuses. Every start writes the last three again; ranks may find damage after that.
MAY_CHANGE = (".lock", "ranks/", "outcome.json", "config.yaml", "versions.json", "mesh.json")


def damaged(scenario: Scenario) -> None:
    """One file, or two, of a run that was stopped in the middle or is finished; also of the token cache."""
    rng, place = scenario.rng, scenario.place
    finished = rng.random() < 0.25
    place.work.rmdir()
    shutil.copytree(scenario.base(place.layout, finished), place.work)
    folder = place.run_folder
    if rng.random() < 0.1:
        place.cache = shutil.copytree(place.cache or place.root, place.root / "cache")
        folder = place.cache
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if rng.random() < 0.75 and (important := [p for p in files if "checkpoints" in p.parts or p.suffix == ".jsonl"]):
        files = important
    untouched = {path: path.read_bytes() for path in files}
    for _ in range(rng.choice([1, 1, 1, 2])):
        path = rng.choice(files)
        how = rng.choice(list(WAYS))
        if path.is_file() and not path.is_symlink():
            WAYS[how](path, rng, files)
            where = path.relative_to(folder)
            scenario.plant(f"{how} {_kind(where)}{' of a finished run' if finished else ''}")
    before = digests(place.work)
    ended = place.run(*SHORT)
    if ended.code == 0:
        scenario.finishes(steps=SHORT, ended=ended)
        return
    verdict = refused(place, ended)
    after = digests(place.work)
    if changed := [n for n in {**before, **after} if before.get(n) != after.get(n) and not _may_change(n)]:
        raise Defect(f"the refused start changed {', '.join(sorted(changed)[:5])}; it said: {ended.sentence}")
    scenario.came_to(verdict)
    if rng.random() < 0.3:  # nothing was harmed: with the files as they were it goes on
        for path, content in untouched.items():
            _remove(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        scenario.finishes(steps=SHORT)


def _may_change(name: str) -> bool:
    return any(name.removeprefix("runs/a/").startswith(one) for one in MAY_CHANGE)


def _kind(path: Path) -> str:
    """What sort of file it is, for the table."""
    if path.suffix == ".distcp":
        return "a shard"
    return {"rank-0.log": "a log", "rank-1.log": "a log"}.get(path.name, path.name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _by(change: Callable[[bytes, random.Random], bytes]) -> Way:
    return lambda path, rng, files: path.write_bytes(change(path.read_bytes(), rng))


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _reorder(content: bytes, rng: random.Random) -> bytes:
    """Two parts of the file change places, lines in a file of lines."""
    parts = content.splitlines(keepends=True)
    if len(parts) < 3:
        half = len(content) // 2
        return content[half:] + content[:half]
    i, j = rng.sample(range(len(parts)), 2)
    parts[i], parts[j] = parts[j], parts[i]
    return b"".join(parts)


def _swap(path: Path, rng: random.Random, files: list[Path]) -> None:
    """Two files change places."""
    other = rng.choice([file for file in files if file != path and file.is_file()] or [path])
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _instead(make: Callable[[Path], None]) -> Way:
    def replace(path: Path, rng: random.Random, files: list[Path]) -> None:
        path.unlink()
        make(path)

    return replace


WAYS: dict[str, Way] = {
    "truncated": _by(lambda content, rng: content[: rng.randrange(len(content))] if content else b""),
    "flipped a bit of": _by(_flip),
    "removed": _instead(lambda path: None),
    "emptied": _by(lambda content, rng: b""),
    "zeroed": _by(lambda content, rng: bytes(len(content))),  # what a power cut leaves: the size is right
    "appended to": _by(lambda content, rng: content + rng.randbytes(rng.randint(1, 200))),
    "swapped": _swap,
    "a folder instead of": _instead(Path.mkdir),
    "a looping link instead of": _instead(lambda path: path.symlink_to(path.name)),
    "reordered": _by(_reorder),
}
