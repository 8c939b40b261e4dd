"""What a start of a run finds: the checkpoint to go on from, and whether it fits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from plait.checkpoint.store import Manifest, Store
from plait.config import Checkpoint, accumulation
from plait.errors import PlaitError

if TYPE_CHECKING:
    from plait.check import Checked
    from plait.folder import RunFolder

Say = Callable[[str], None]
ADOPTED = "train.global_batch_size"  # null takes the checkpoint's, and so does not differ from it


@attrs.frozen
class Found:
    """What a start of the run found: the step to go on from (0: from the beginning), and whether that is the end."""

    step: int
    finished: bool


def look(checked: "Checked", folder: "RunFolder", say: Say) -> Found:
    """Before a rank starts: which checkpoint this run goes on from, if any; says so in one line.

    Only for who holds the run's lock. Where `train.global_batch_size` is null the checkpoint's is kept, so that a
    run resumed on other ranks sees the same samples. Raises PlaitError where the checkpoint asked for is damaged, is
    of another model, or holds the state of a stream that was split into another number of shares.
    """
    conf = checked.config.checkpoint
    store = Store(folder.checkpoints(conf.dir))
    store.clean()
    if conf.enabled and conf.load == "never" and (old := store.complete()):
        raise PlaitError(
            f"checkpoint.load=never would start over beside {len(old)} checkpoint(s), the last {old[-1]}: "
            "set another run.name, or remove them"
        )
    path = choose(conf, store, say) if conf.enabled else None
    if path is None:
        if conf.init_from:
            from plait.checkpoint.weights import check_weights

            check_weights(conf.init_from, checked.shapes, checked.ties)
        say(f"checkpoint: none to resume; starting at step 0{f' from {conf.init_from}' if conf.init_from else ''}")
        return Found(0, False)
    manifest = Store.read(path)
    Store.check_model(manifest, checked.shapes)
    exported = any((folder.path / "export").glob("model*.safetensors*"))
    done = manifest.step >= checked.config.train.steps and (exported or not conf.export)
    if not done:
        say(f"checkpoint: resuming after step {manifest.step} from {path}")
        if changed := differences(manifest.config, checked.node):
            say(f"checkpoint: these differ from the checkpoint's config: {'; '.join(changed)}")
        _check_data(manifest, checked)
    return Found(manifest.step, done)


def choose(conf: Checkpoint, store: Store, say: Say) -> Path | None:
    """The run's own newest sound checkpoint, else the one that `checkpoint.load` names, else None.

    Its own come first, so that the same command, given again, goes on. Raises PlaitError for a path that is not a
    sound checkpoint.
    """
    if own := store.latest(say):
        return own
    if conf.load in ("latest", "never"):
        return None
    if problem := Store.verify(conf.load):
        raise PlaitError(f"checkpoint.load={conf.load} cannot be loaded: {problem}")
    return Path(conf.load)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: saved -> now` of every value that differs, by dotted key."""
    before, after = _flat(saved), _flat(now)
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not (key == ADOPTED and after.get(key) is None)
    ]


def _flat(node: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(node, Mapping):
        return {key: list(node) if isinstance(node, tuple) else node}
    return {
        k: v for name, value in node.items() for k, v in _flat(value, f"{key}.{name}" if key else str(name)).items()
    }


def _check_data(manifest: Manifest, checked: "Checked") -> None:
    shares, saved = checked.layout.count("batch"), manifest.data.get("shares")
    if not checked.source.indexable and saved not in (None, shares):
        raise PlaitError(
            f"the checkpoint of step {manifest.step} holds a stream that was read in {saved} shares, and this run "
            f"has {shares}: a stream resumes only at the same data-parallel degree"
        )
    size = manifest.data.get("global_batch_size")
    train = checked.config.train
    if train.global_batch_size is None and size is not None:
        train.global_batch_size = size
        accumulation(checked.config, shares)
        checked.node["train"] = {**checked.node["train"], "global_batch_size": size}
