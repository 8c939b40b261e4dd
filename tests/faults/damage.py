"""Damage to any file that a run wrote: the next start goes on and ends equal, or refuses and touches nothing."""

import random
import shutil
from pathlib import Path

from tests.faults.place import SHORT, digests
from tests.faults.scenario import Defect, Scenario
from tests.faults.verdict import refused

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


def _truncate(path: Path, rng: random.Random, files: list[Path]) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))] if content else b"")


def _flip(path: Path, rng: random.Random, files: list[Path]) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _delete(path: Path, rng: random.Random, files: list[Path]) -> None:
    path.unlink()


def _empty(path: Path, rng: random.Random, files: list[Path]) -> None:
    path.write_bytes(b"")


def _zeros(path: Path, rng: random.Random, files: list[Path]) -> None:
    """What a power cut leaves on some file systems: the size is right, the content is not."""
    path.write_bytes(bytes(path.stat().st_size))


def _append(path: Path, rng: random.Random, files: list[Path]) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 200)))


def _swap(path: Path, rng: random.Random, files: list[Path]) -> None:
    """Two files change places."""
    other = rng.choice([file for file in files if file != path and file.is_file()] or [path])
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _folder(path: Path, rng: random.Random, files: list[Path]) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path, rng: random.Random, files: list[Path]) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _reorder(path: Path, rng: random.Random, files: list[Path]) -> None:
    """Two parts of the file change places, lines in a file of lines."""
    content = path.read_bytes()
    parts = content.splitlines(keepends=True)
    if len(parts) < 3:
        half = len(content) // 2
        path.write_bytes(content[half:] + content[:half])
        return
    i, j = rng.sample(range(len(parts)), 2)
    parts[i], parts[j] = parts[j], parts[i]
    path.write_bytes(b"".join(parts))


WAYS = {
    "truncated": _truncate,
    "flipped a bit of": _flip,
    "removed": _delete,
    "emptied": _empty,
    "zeroed": _zeros,
    "appended to": _append,
    "swapped": _swap,
    "a folder instead of": _folder,
    "a looping link instead of": _loop,
    "reordered": _reorder,
}
