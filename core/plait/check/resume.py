"""Finds the checkpoint to continue from, and checks whether it fits.

Ranks that restart choose again, in `plait.checkpoint.choose`.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from plait.check.epochs import with_steps
from plait.check.resumed_data import check_data, with_batch_of, with_data_of, with_parts_of
from plait.check.trained import check_checkpoint, check_start
from plait.checkpoint.at_address import open_store
from plait.checkpoint.choose import Say, choose
from plait.checkpoint.folder_owner import check_owner
from plait.checkpoint.pieces import Damaged
from plait.checkpoint.slot import Slot
from plait.checkpoint.store import Manifest, Store
from plait.checkpoint.sums import check_sums
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.records import metrics
from plait.records.metrics_seal import check_seal
from plait.records.run_folder import versions_of
from plait.system.disk import reading
from plait.system.held_memory import of_this_machine

if TYPE_CHECKING:
    from plait.check.checked import Checked
    from plait.records.run_folder import RunFolder

BATCH, PARTS = "train.global_batch_size", "train.data_parts"


@attrs.frozen
class Continuation:
    """What a start of the run found: the step to continue from (0: from the beginning), whether that is the end, and
    the config to continue under."""

    step: int
    finished: bool
    config: Config


def find_checkpoint(checked: "Checked", folder: "RunFolder", say: Say) -> Continuation:
    """Before a rank starts: which checkpoint this run continues from, if any; reports it in one line.

    Only for the holder of the run's lock. If `train.global_batch_size` is null the checkpoint's is kept, so that a run
    resumed on other ranks takes the same steps. Raises PlaitError if the run would start over beside its checkpoints,
    or if the requested checkpoint is damaged, is of another model, or its data cannot continue in this run.
    """
    conf = checked.config.checkpoint
    store = open_store(folder.checkpoints(conf.dir))
    check_owner(store.folder, folder.path)
    _keep_what_there_is(checked, store, folder)
    _keep_what_is_elsewhere(conf.dir, store, folder)
    if conf.enabled:
        store.clean()
    while path := choose(conf, store, say) if conf.enabled else None:
        try:
            return _continued(path, store, checked, folder, say)
        except Damaged as error:
            store.damaged[path] = error.why or str(error)
    if conf.init_from:
        check_start(conf.init_from, checked)
    if conf.memory_steps and any(map(_holds_copy, of_this_machine()[0])):
        say("checkpoint: none on the disk; there are copies in memory")
        return Continuation(0, False, with_steps(checked, checked.config, None))
    say(f"checkpoint: none to resume; starting at step 0{f' from {conf.init_from}' if conf.init_from else ''}")
    if metrics.last_step(folder.path / metrics.FILE):
        say(f"metrics: those of an earlier start move to {metrics.OLD}")
    return Continuation(0, False, with_steps(checked, checked.config, None))


def _holds_copy(place: str) -> bool:
    with contextlib.closing(Slot(place)) as slot:
        return slot.notes() is not None


def _continued(path: Path, store: Store, checked: "Checked", folder: "RunFolder", say: Say) -> Continuation:
    """What a start from the checkpoint at `path` finds. Raises as `find_checkpoint`, and Damaged."""
    conf, config = checked.config.checkpoint, checked.config
    manifest = Store.read(path)
    check_checkpoint(manifest, checked)
    _check_optimizer(path, manifest, checked)
    own = path.parent == store.folder
    if own:
        check_seal(folder.metrics, manifest.data.get("metrics"), manifest.step)
        rows = len(metrics.upto(folder.metrics, manifest.step))
        if rows < manifest.step:
            say(f"metrics: {metrics.FILE} has only {rows} rows of the {manifest.step} steps before")
    exported = not conf.export or (
        _is_exported(manifest.step, folder, say) and not _exports_otherwise(checked, folder, say)
    )
    config = with_steps(checked, config, manifest)
    done = _is_at_its_end(manifest.step, config.train.steps, folder) and exported
    if done and (problem := Store.verify(path)):  # else the ranks compare what they read
        raise Damaged.because(path, problem)
    if not done:
        say(f"checkpoint: resuming after step {manifest.step} from {path}")
        if conf.load not in ("latest", "never") and own:
            say(f"checkpoint.load={conf.load} is not used, because the run has its own checkpoints")
        check_data(manifest, checked)
        config = with_data_of(manifest, checked, config)
        config = with_batch_of(manifest, config, checked.layout.count("batch"), say)
        if not checked.source.indexable:
            config = with_parts_of(manifest, config)
        if changed := differences(manifest, config.plain()):
            say(f"checkpoint: these differ from the checkpoint's config: {'; '.join(changed)}")
        if changed := _changed(manifest.versions, versions_of(checked.distributions)):
            say(f"checkpoint: these versions differ from the checkpoint's: {'; '.join(changed)}")
    elif own and metrics.cut_torn_end(folder.path / metrics.FILE):  # a run that continues cuts it when it writes
        say(f"metrics: the end of {metrics.FILE} was not a row of this run, and is cut")
    return Continuation(manifest.step, done, config)


def _is_at_its_end(step: int, steps: int, folder: "RunFolder") -> bool:
    """Whether nothing is left to train after `step`: a run may have ended itself before its last step."""
    outcome = folder.outcome()
    ended = outcome is not None and outcome.kind == "finished" and (outcome.step, outcome.asked) == (step, steps)
    return step >= steps or ended


def _check_optimizer(path: Path, manifest: Manifest, checked: "Checked") -> None:
    """Raises PlaitError if this run's optimizer has other state than the checkpoint's; ranks would find that late."""
    optimizer, kept = checked.config.optimizer, checked.config.precision.optimizer
    before = manifest.config.get("precision", {}).get("optimizer")
    if before != kept and "8bit" in (before, kept):
        raise PlaitError(
            f"precision.optimizer={kept or 'null'}: the checkpoint {path} keeps the optimizer's states as "
            f"precision.optimizer={before or 'null'} says, and nothing turns 8 bits into others or others into 8 bits; "
            "take the checkpoint's, or begin another run with its weights (checkpoint.init_from)"
        ).at("precision.optimizer", kept, fits=(before,))
    if manifest.config.get("optimizer") == optimizer:
        return
    from plait.checkpoint.load import check_optimizer_state
    from plait.checkpoint.reader import Reader
    from plait.parallel.optimizer_groups import groups_of
    from plait.train.optimizer_options import state_keys
    from plait.train.rounding import Rounding

    assembly = checked.assembly
    rounding = Rounding.of(checked.config.precision, 0)
    keys = state_keys(optimizer, groups_of([assembly.model], assembly.run.spec), rounding)
    ours = [f"optimizer.{name}.{key}" for name in keys for key in keys[name]]
    check_optimizer_state(path, Reader(path).shapes, ours)


def _is_exported(step: int, folder: "RunFolder", say: Say) -> bool:
    """Whether the weights after `step` are there undamaged; otherwise they will be written again. The outcome of a run
    is written after its export, and removed when it goes on."""
    export, outcome = folder.path / "export", folder.outcome()
    if not any(export.glob("*.safetensors*")) or outcome is None or (outcome.kind, outcome.step) != ("finished", step):
        return False
    try:
        check_sums(export)
    except PlaitError as error:
        say(f"export: {error}; the run writes its weights again")
        return False
    return True


def _exports_otherwise(checked: "Checked", folder: "RunFolder", say: Say) -> bool:
    """Whether a strategy that writes the export has other options than when the run's folder was written last."""
    try:
        before = folder.read_config().get("strategy") or {}
    except PlaitError:
        return False
    now = checked.config.strategy
    for name in checked.assembly.hooks.implemented("export"):
        if before.get(name) != (options := dict(now.get(name) or {})):
            changed = ", ".join(
                f"strategy.{name}.{k}={v}" for k, v in options.items() if (before.get(name) or {}).get(k) != v
            )
            say(f"export: {changed} differs from what was exported; the run writes its weights again")
            return True
    return False


def _keep_what_there_is(checked: "Checked", store: Store, folder: "RunFolder") -> None:
    """Raises PlaitError if the config asks to start over beside checkpoints, or in place of a longer run."""
    conf, steps = checked.config.checkpoint, checked.config.train.steps
    if conf.enabled and conf.load != "never":
        return
    begin = "checkpoint.load=never" if conf.enabled else "checkpoint.enabled=false"
    if old := store.found():
        raise PlaitError(
            f"{begin} would start over beside {len(old)} checkpoint(s), the last {old[-1]}: "
            "set another run.name, or remove them"
        )
    if not conf.enabled and (last := metrics.last_step(folder.path / metrics.FILE)) > steps:
        raise PlaitError(
            f"{begin} would start over, and the metrics in {folder.path} reach step {last}, past train.steps={steps}: "
            f"set another run.name, or move {metrics.FILE} away"
        )


def _keep_what_is_elsewhere(directory: str, store: Store, folder: "RunFolder") -> None:
    """Raises PlaitError if only the folder of checkpoints of the last start has any: this one would start over."""
    if store.found() or not (folder.path / "config.yaml").is_file():
        return
    with reading(folder.path / "config.yaml", "the run's folder"):
        before = (folder.read_config().get("checkpoint") or {}).get("dir", directory)
    if folder.checkpoints(before) != store.folder and (old := open_store(folder.checkpoints(before)).found()):
        raise PlaitError(
            f"checkpoint.dir={directory} holds no checkpoint of this run, which has {len(old)}, the last {old[-1]}: "
            f"move them there, set checkpoint.dir={before}, or set another run.name"
        ).at("checkpoint.dir", directory, before)


def differences(manifest: Manifest, now: Mapping[str, Any]) -> list[str]:
    """`key: saved -> now` of every value that differs, by dotted key; none if the checkpoint has no config."""
    before, after = _flat(manifest.config), _flat(now)
    if not manifest.config:
        return []
    if before.get(BATCH) is None:
        before[BATCH] = manifest.data.get("global_batch_size")  # the value that null became
    if before.get(PARTS) is None:
        before[PARTS] = len(manifest.data.get("states") or ()) or None
    return _changed({**dict.fromkeys(after), **before}, {**dict.fromkeys(before), **after})


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [f"{key}: {old} -> {after[key]}" for key, old in before.items() if key in after and old != after[key]]


def _flat(node: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(node, Mapping):
        return {key: list(node) if isinstance(node, tuple) else node}
    return {
        k: v for name, value in node.items() for k, v in _flat(value, f"{key}.{name}" if key else str(name)).items()
    }
