"""The model card of a trained model: what its run recorded, as a README.md for a hub."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from plait import Config
from plait.host import RunFolder, metrics
from plait_use.shareable import shareable, shortened

COMMON = ("train", "optimizer", "schedule", "precision")  # the nodes whose values a reader asks for
LEFT_OUT = {"gc_interval", "data_parts", "fused", "groups", "foreach", "shape"}
NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)  # of a model on the hub
CACHED = re.compile(r"(?:^|/)models--([\w.-]+?)--([\w.-]+)")  # a model in the cache of the hub's library


def card(name: str, run: Path, ended: bool) -> str:
    """The text of a README.md. name: of the model on the hub. run: the folder of its run. ended: whether the weights
    are those after its last step; other weights have no step and no results."""
    folder = RunFolder(run)
    recorded, outcome = Config.of(folder.read_config()), folder.outcome() if ended else None
    config, step = shareable(recorded.plain()), outcome.step if outcome is not None else None
    base = hub_id(recorded.model.get("path"))
    head: dict[str, Any] = {"tags": ["plait"]}
    if recorded.model.get("path") is not None:
        head |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base is not None:
        head["base_model"] = base
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {name.rpartition('/')[2]}", ""]
    lines += [_first(config, base, step), ""]
    if step is not None and (rows := _results(run, step)):
        lines += ["## Results", "", *_table(("", "value"), rows), ""]
    lines += ["## Training", "", *_table(("key", "value"), _values(config)), ""]
    lines += ["## Layout and versions", "", *_table(("", ""), _made_with(folder, config)), ""]
    lines += ["The configuration, without secrets and without what is of its machines alone:", ""]
    lines += ["```yaml", yaml.safe_dump(config, sort_keys=False).strip(), "```", ""]
    return "\n".join(lines)


def hub_id(path: Any) -> str | None:
    """The name on the hub of the model at `path`: in the cache of the hub's library, or named so and not a folder here;
    None if it has none."""
    if cached := CACHED.search(str(path)):
        return "/".join(cached.groups())
    return path if isinstance(path, str) and NAME.fullmatch(path) and not Path(path).exists() else None


def _first(config: Mapping[str, Any], base: str | None, step: int | None) -> str:
    model, data = config["model"], config["data"]
    if base is None and model.get("path") is not None:
        base = Path(str(model["path"])).name
    base = base or config["checkpoint"]["init_from"]
    what = f"Fine-tuned from `{base}`" if base else f"Trained from random weights, `{model['_target_']}`,"
    steps = f", {step:,} steps" if step is not None else ""
    on = data.get("path") or data.get("name") or data["_target_"]
    return f"{what} with [Plait](https://github.com/plait-train/plait) on `{on}`{steps}."


def _results(folder: Path, step: int) -> list[tuple[str, str]]:
    """Losses of the last rows up to `step`."""
    file = folder / metrics.FILE
    rows = [row for row in metrics.read(file) if row["step"] <= step] if file.is_file() else []
    found = []
    for key in ("loss", *sorted({key for row in rows for key in row if key.startswith("val_loss")})):
        last = next((row for row in reversed(rows) if key in row), None)
        if last is not None:
            label = {"loss": "training loss", "val_loss": "validation loss"}.get(
                key, f"validation loss, {shortened(key.partition('/')[2])}"
            )
            value = "not finite" if last[key] is None else f"{last[key]:.4f}"  # null in the file
            found.append((label, f"{value} after step {last['step']:,}"))
    if rows and "tokens" in rows[-1]:
        found.append(("tokens seen", f"{rows[-1]['tokens']:,}"))
    return found


def _values(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"`{node}.{key}`", f"`{value}`")
        for node in COMMON
        for key, value in config[node].items()
        if value is not None and value != {} and key not in LEFT_OUT
    ]


def _made_with(folder: RunFolder, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("strategies", ", ".join(config["strategy"]) or "none")]
    if (file := folder.path / "mesh.json").is_file():
        dense = json.loads(file.read_text(encoding="utf-8")).get("dense") or []
        rows.append(("mesh", " x ".join(f"{axis['name']}={axis['degree']}" for axis in dense) or "one rank"))
    if (folder.path / "versions.json").is_file():
        rows += [(name, version) for name, version in folder.read_versions().items() if name != "data"]
    return rows


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
