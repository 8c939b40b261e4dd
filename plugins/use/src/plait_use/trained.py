"""What the word RUN of a command names: a run, one of its checkpoints, its export, or a Hugging Face folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from plait import Config, PlaitError
from plait.host import RunFolder, Store, check_trained, checkpoint_at, compose, located, open_store, reading, recompose

if TYPE_CHECKING:
    from plait.host import Checked

FITS = "a run, one of its checkpoints, its export, or a folder of Hugging Face's"
# What a run asks for, and its use does not.
OTHERWISE: dict[str, dict[str, Any]] = {
    "checkpoint": {"enabled": False, "load": "latest", "memory_steps": None, "keep_best": False},
    "validation": {"patience": None},
    "launch": {"mode": "local", "nnodes": 1, "rdzv_endpoint": None},
    "profile": {"enabled": False},
    "metrics": {"wandb": False},
    "train": {"epochs": None},
}
WITHOUT: dict[str, Any] = {"observer": {}, "sink": {}, "cluster": {}}


@attrs.frozen
class Trained:
    """A trained model.

    path: of its checkpoint, or of a folder of weights. config: of its run, under the overrides. checkpoint: None if
    `config` names the weights. step: after which it was saved; None: not known. batch: samples of a global batch of its
    run; None: not known.
    """

    path: Path
    config: Config
    checkpoint: Path | None
    step: int | None = None
    batch: int | None = None

    @property
    def for_logits(self) -> Config:
        """`config` for a use that needs whole logits, and no data to validate on."""
        return self.config.with_value("loss.chunks", 1).with_value("validation.interval", 0)

    def loadable(self, checked: "Checked") -> str | None:
        """The checkpoint, as `load_model` takes it on the ranks. Raises PlaitError unless it has the model of
        `checked`."""
        check_trained(checked, self.checkpoint)
        return None if self.checkpoint is None else str(self.checkpoint)

    def writes(self, checked: "Checked") -> str | None:
        """The same, of a model that predicts the next token. Raises PlaitError for others."""
        if not checked.assembly.run.spec.causal:
            raise PlaitError(
                f"{self.path} is an encoder: it predicts hidden tokens, and writes no text; plait eval tells its loss"
            ).at("RUN", str(self.path), fits="a model that predicts the next token")
        return self.loadable(checked)

    def __str__(self) -> str:
        return f"{self.path}{f', step {self.step}' if self.step is not None else ''}"


def find(word: str, overrides: Sequence[str]) -> Trained:
    """What `word` names, under overrides as for `plait train`. Raises PlaitError if it names nothing, or a run that has
    saved nothing yet."""
    with reading(word, "RUN"):
        if "://" in word:
            at = checkpoint_at(word)
            return _of_checkpoint(open_store(at).latest() or at, overrides)
        path = located(word, "RUN", FITS)
        if (path / "manifest.json").is_file():
            return _of_checkpoint(path.parent / path.readlink() if path.is_symlink() else path, overrides)
        if (path / "config.yaml").is_file():
            return _of_run(path, overrides)
        if any(path.glob("*.safetensors")):
            return _of_weights(path, overrides)
    raise PlaitError(f"{path} is none: it must be {FITS}").at("RUN", word, fits=FITS)


def _of_run(path: Path, overrides: Sequence[str]) -> Trained:
    folder = RunFolder(path)
    recorded = folder.read_config()
    where = (recorded.get("checkpoint") or {}).get("dir", "checkpoints")
    newest = open_store(folder.checkpoints(where)).latest()
    if newest is not None:
        return _of_checkpoint(newest if "://" in where else path / where / newest.name, overrides)
    if any((path / "export").glob("*.safetensors")):
        return _of_weights(path / "export", overrides)
    raise PlaitError(f"the run {path} has saved nothing yet: it has no checkpoint and no export").at(
        "RUN", str(path), fits="a run with a checkpoint"
    )


def _of_checkpoint(path: Path, overrides: Sequence[str]) -> Trained:
    if problem := Store.quick_problem(path):
        raise PlaitError(f"the checkpoint {path} cannot be loaded: {problem}").at("RUN", str(path))
    manifest = Store.read(path)
    recorded = manifest.config or _config_above(path)
    if not recorded:
        raise PlaitError(
            f"the checkpoint {path} does not say of which model it is, and no run's folder is around it"
        ).at("RUN", str(path), fits=FITS)
    batch = manifest.data.get("global_batch_size")
    return Trained(path, _composed(recorded, overrides), path, manifest.step, batch)


def _of_weights(path: Path, overrides: Sequence[str]) -> Trained:
    if recorded := _config_above(path):
        config = _composed(recorded, overrides, {"init_from": str(path)})
        return Trained(path, config, None, batch=config.train.global_batch_size)
    chosen = any(each.lstrip("+").startswith("model=") for each in overrides)
    if not chosen and not (path / "config.json").is_file():
        raise PlaitError(
            f"{path} has weights but no config.json, and no run's folder is around it: say which model they are of, "
            "such as model=qwen3_0.6b"
        ).at("RUN", str(path), fits=FITS)
    own = [f"checkpoint.init_from={path}"] if chosen else ["model=transformers", f"model.path={path}"]
    own += ["checkpoint.enabled=false", "launch.mode=local"]
    return Trained(path, compose([*own, *overrides]), None)


def folder_above(path: Path) -> Path | None:
    """The folder of the run in which `path` is."""
    return next((each for each in path.absolute().parents[:2] if (each / "config.yaml").is_file()), None)


def _config_above(path: Path) -> Mapping[str, Any]:
    """The config of the run in whose folder `path` is; empty if there is none."""
    above = folder_above(path)
    return RunFolder(above).read_config() if above else {}


def _composed(recorded: Mapping[str, Any], overrides: Sequence[str], weights: Mapping[str, Any] = {}) -> Config:
    kept = {**recorded, **WITHOUT}
    for name, changed in OTHERWISE.items():
        kept[name] = {**(recorded.get(name) or {}), **changed}
    kept["checkpoint"] = {**kept["checkpoint"], **weights}
    return recompose(kept, overrides)
