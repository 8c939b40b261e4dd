"""Which names may become files and folders, so that nothing is written to an unexpected place."""

import os
from pathlib import PurePath

LONGEST = 200  # bytes; file systems allow 255, and names of temporary files are longer than the final ones
OWN = (
    *("config.yaml", "export", "mesh.json", "metrics.jsonl", "outcome.json", "profile", "ranks", "tensorboard"),
    *("versions.json", "wandb", "wandb.id", ".lock"),
)


def check_name(name: str, key: str) -> None:
    """Raises ValueError, whose message begins with `key`, unless `name` can be the name of one folder."""
    why = _no_name(name)
    if why:
        raise ValueError(f"{key} must be a plain name, and {name!r} {why}")


def check_inside(path: str, key: str) -> None:
    """Raises ValueError, whose message begins with `key`, unless `path` is absolute or a folder inside the run's."""
    place = PurePath(path)
    whole, parts = place.is_absolute(), place.parts[place.is_absolute() :]
    for part in parts or ([] if whole else [""]):
        if why := _too_long(part) if whole and part.isprintable() else _no_name(part):
            raise ValueError(
                f"{key} must be a folder inside the run's or an absolute path, and in {path!r} the part {part!r} {why}"
            )
    if not whole and parts[0] in OWN:
        raise ValueError(f"{key} must be a folder of its own, and the run keeps other things in {path!r}")


def _no_name(name: str) -> str:
    if not name:
        return "is empty"
    if os.sep in name or "\\" in name:
        return "holds a path separator"
    if not name.isprintable():
        return "holds characters that cannot be printed"
    if name == "..":
        return "leads out of its folder"
    if not name.strip(". "):
        return "holds only dots and spaces"
    if name.startswith("-"):
        return "begins with a dash, as options of commands do"
    if name != name.strip():
        return "begins or ends with a space"
    return _too_long(name)


def _too_long(name: str) -> str:
    size = len(os.fsencode(name))
    return f"is {size} bytes long; {LONGEST} may be" if size > LONGEST else ""
