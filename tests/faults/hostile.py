"""Files that a stranger made to run code, to read elsewhere or to use up the machine: each is refused."""

import json
import shutil
import struct
from pathlib import Path

from tests.faults.place import SHORT
from tests.faults.scenario import Defect, Scenario
from tests.faults.verdict import refused
from tests.helpers.hostile import PICKLES, sign

FAR = 1 << 50  # bytes that nobody has


def hostile(scenario: Scenario) -> None:
    """A hostile file in a sound folder, with digests that fit it: by resume, load, init_from or convert."""
    rng, place = scenario.rng, scenario.place
    shutil.rmtree(place.work)
    shutil.copytree(scenario.base(place.layout, False), place.work)
    marker = place.root / "marker"
    checkpoints = sorted(place.run_folder.glob("checkpoints/step-*"), key=lambda p: int(p.name[5:]))
    way = rng.choice(["resume", "load", "init_from", "convert"])
    targets = checkpoints if way == "resume" else checkpoints[-1:]
    name, bomb = rng.choice(list(PICKLES.items()))
    source = str(checkpoints[-1])
    folders: tuple[Path, ...] = ()
    if rng.random() < 0.1:  # a run's own config.yaml, which the next start replaces
        scenario.plant("hostile config.yaml, by resume")
        text = f"!!python/object/apply:os.system ['touch {marker}']\n"
        (place.run_folder / "config.yaml").write_text(text)
        scenario.finishes(steps=SHORT)
        _untouched(marker)
        return
    if way in ("init_from", "convert") and rng.random() < 0.4:
        planted, file = rng.choice(list(_safetensors(place.work).items()))
        source = str(file)
    elif rng.random() < 0.7:
        planted = f".metadata ({name})"
        for checkpoint in targets:
            _replace(checkpoint, ".metadata", bomb(f"touch {marker}"))
    else:
        planted = f"shard ({name})"
        for checkpoint in targets:
            _replace(checkpoint, min(checkpoint.glob("__*.distcp")).name, bomb(f"touch {marker}"))
    scenario.plant(f"hostile {planted}, by {way}")
    if way == "resume":
        ended = place.run(*SHORT)
    elif way == "convert":
        model = [a for a in place.arguments() if a.startswith("model.")]
        ended = place.command(["convert", source, "converted", "--to", "hf", *model]).wait()
    else:
        key = "checkpoint.load" if way == "load" else "checkpoint.init_from"
        ended = place.run(*SHORT, f"{key}={source}", "run.name=b")
        folders = (place.work / "runs" / "b",)
    _untouched(marker)
    verdict = refused(place, ended)
    for folder in folders:
        if (folder / "checkpoints").exists() and any((folder / "checkpoints").iterdir()):
            raise Defect("the refused start saved checkpoints")
    scenario.came_to(verdict)


def _untouched(marker: Path) -> None:
    if marker.exists():
        raise Defect("a hostile file ran code")


def _replace(checkpoint: Path, name: str, content: bytes) -> None:
    """Put `content` there as its author would: with a manifest whose digests fit."""
    (checkpoint / name).write_bytes(content)
    sign(checkpoint)


def _safetensors(folder: Path) -> dict[str, Path]:
    """What may be wrong with weights of a stranger -> a file or folder of that kind."""

    def file(name: str, header: object, size: int | None = None) -> Path:
        text = json.dumps(header).encode()
        path = folder / f"{name}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + bytes(64))
        return path

    far = {"tok_embeddings.weight": {"dtype": "F32", "shape": [FAR // 4], "data_offsets": [0, FAR]}}
    index = folder / "indexed"
    index.mkdir()
    outside = {"metadata": {}, "weight_map": {"tok_embeddings.weight": "../../../../etc/passwd"}}
    (index / "model.safetensors.index.json").write_text(json.dumps(outside))
    return {
        "a tensor of a petabyte": file("far", far),
        "a header of a petabyte": file("header", {}, FAR),
        "a negative shape": file("negative", {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
        "a header that is no mapping": file("list", [1, 2, 3]),
        "an index that leads out": index,
    }
