"""The model card of a trained model: what its run recorded, as a README.md for a hub."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from plait import Config
from plait.host import RunFolder, metrics

COMMON = ("train", "optimizer", "schedule", "precision")  # the nodes whose values a reader asks for
LEFT_OUT = {"gc_interval", "data_parts", "fused", "groups", "foreach", "shape"}


def card(name: str, run: Path) -> str:
    """The text of a README.md. name: of the model on the hub. run: the folder of its run."""
    folder = RunFolder(run)
    config, outcome = Config.of(folder.read_config()), folder.outcome()
    step, base = outcome.step if outcome is not None else None, base_of(config)
    head: dict[str, Any] = {"tags": ["plait"]}
    if config.model.get("path") is not None:
        head |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base is not None and "/" in base and not base.startswith(("/", "~", ".")) and not Path(base).exists():
        head["base_model"] = base
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {name.rpartition('/')[2]}", ""]
    lines += [_first(config, base, step), ""]
    if rows := _results(run, step):
        lines += ["## Results", "", *_table(("", "value"), rows), ""]
    lines += ["## Training", "", *_table(("key", "value"), _values(config)), ""]
    lines += ["## Layout and versions", "", *_table(("", ""), _made_with(folder, config)), ""]
    lines += ["The whole configuration:", "", "```yaml", _shareable(config), "```", ""]
    return "\n".join(lines)


def base_of(config: Config) -> str | None:
    """What the weights began as: a model's folder, or other weights; None if they were random."""
    path = config.model.get("path")
    return str(path) if path is not None else config.checkpoint.init_from


def _first(config: Config, base: str | None, step: int | None) -> str:
    what = f"Fine-tuned from `{_last(base)}`" if base else f"Trained from random weights, `{config.model['_target_']}`,"
    data = config.data.get("path") or config.data.get("name") or config.data["_target_"]
    steps = f", {step:,} steps" if step is not None else ""
    return f"{what} with [Plait](https://github.com/plait-train/plait) on `{_last(str(data))}`{steps}."


def _results(folder: Path, step: int | None) -> list[tuple[str, str]]:
    """Losses of the last rows up to `step`."""
    file = folder / metrics.FILE
    rows = [row for row in metrics.read(file) if step is None or row["step"] <= step] if file.is_file() else []
    found = []
    for key in ("loss", *sorted({key for row in rows for key in row if key.startswith("val_loss")})):
        last = next((row for row in reversed(rows) if key in row), None)
        if last is not None:
            label = {"loss": "training loss", "val_loss": "validation loss"}.get(
                key, f"validation loss, {key.partition('/')[2]}"
            )
            found.append((label, f"{last[key]:.4f} after step {last['step']:,}"))
    if rows and "tokens" in rows[-1]:
        found.append(("tokens seen", f"{rows[-1]['tokens']:,}"))
    return found


def _values(config: Config) -> list[tuple[str, str]]:
    plain = config.plain()
    return [
        (f"`{node}.{key}`", f"`{value}`")
        for node in COMMON
        for key, value in plain[node].items()
        if value is not None and value != {} and key not in LEFT_OUT
    ]


def _made_with(folder: RunFolder, config: Config) -> list[tuple[str, str]]:
    rows = [("strategies", ", ".join(config.strategy) or "none")]
    if (file := folder.path / "mesh.json").is_file():
        dense = json.loads(file.read_text(encoding="utf-8")).get("dense") or []
        rows.append(("mesh", " x ".join(f"{axis['name']}={axis['degree']}" for axis in dense) or "one rank"))
    if (folder.path / "versions.json").is_file():
        rows += [(name, version) for name, version in folder.read_versions().items() if name != "data"]
    return rows


def _shareable(config: Config) -> str:
    """The config in YAML, with the last part of each absolute path alone: others need not know the folders here."""

    def short(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: short(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [short(each) for each in value]
        return _last(value) if isinstance(value, str) and value.startswith(("/", "~")) else value

    return str(yaml.safe_dump(short(config.plain()), sort_keys=False)).strip()


def _last(path: str) -> str:
    return Path(path).name if path.startswith(("/", "~", ".")) else path


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
