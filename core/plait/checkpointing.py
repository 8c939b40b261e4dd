"""A run and its checkpoints: what a start finds, what a save holds, what a restore brings back."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from plait.checkpoint.store import Manifest, Store
from plait.config import Checkpoint
from plait.errors import PlaitError

if TYPE_CHECKING:
    from plait.check import Checked
    from plait.config import Config
    from plait.folder import RunFolder
    from plait.weave import Applied

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
    say(f"checkpoint: resuming after step {manifest.step} from {path}")
    if changed := differences(manifest.config, checked.node):
        say(f"checkpoint: these differ from the checkpoint's config: {'; '.join(changed)}")
    _check_data(manifest, checked)
    exported = any((folder.path / "export").glob("model*.safetensors*"))
    done = manifest.step >= checked.config.train.steps and (exported or not conf.export)
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
        from plait.trainer import accumulation

        train.global_batch_size = size
        accumulation(checked.config, shares)
        checked.node["train"] = {**checked.node["train"], "global_batch_size": size}


class Checkpoints:
    """Saving and restoring one run, on its ranks. Every method is for all ranks together."""

    def __init__(
        self,
        config: "Config",
        node: Mapping[str, Any],
        folder: "RunFolder",
        applied: "Applied",
        optimizer: Any,
        data: Mapping[str, Any],
        batches: Any,
        say: Say,
    ) -> None:
        import torch.distributed as dist

        from plait.checkpoint.save import Saver

        self.conf, self.node, self.folder, self.applied, self.optimizer = (
            config.checkpoint,
            node,
            folder,
            applied,
            optimizer,
        )
        self.data, self.batches, self.say = data, batches, say
        self.store = Store(folder.checkpoints(self.conf.dir))
        self._saver = Saver(self.store, self.conf.mode, self.conf.keep) if self.conf.enabled else None
        self._versions = folder.read_versions()
        if dist.get_rank() == 0:
            folder.write_versions({**self._versions, "data": data["fingerprint"]})

    def restore(self) -> tuple[int, int]:
        """Load what `checkpoint.load` or `checkpoint.init_from` names; returns (step, tokens) to go on from."""
        from plait.checkpoint.load import load

        path = self._agree(lambda: choose(self.conf, self.store, self.say) if self.conf.enabled else None)
        state, after = self.applied.checkpoint(self.optimizer)
        if path is None:
            if self.conf.init_from:
                from plait.checkpoint.state import tied_names, weights
                from plait.checkpoint.weights import read_weights

                read_weights(self.conf.init_from, weights(state), tied_names(self.applied.parts[0]))
                self.say(f"checkpoint: weights from {self.conf.init_from}")
            return 0, 0
        load(path, state, after)
        manifest = Store.read(path)
        if manifest.data.get("fingerprint") != self.data["fingerprint"]:
            self.say("data: the text or its tokenizer changed since the checkpoint; batches will differ from before")
        if states := manifest.data.get("states"):
            self.batches.load_state_dict(states[self.applied.mesh.share("batch")[0]])
        self.say(f"checkpoint: resumed after step {manifest.step}")
        return manifest.step, manifest.tokens

    def save(self, step: int, tokens: int) -> None:
        """Save the state after `step`; with `checkpoint.mode=async` it is written while training goes on."""
        assert self._saver is not None
        state, _ = self.applied.checkpoint(self.optimizer)
        data = {**self.data, "states": self._states()}
        self._saver.save(state, step, tokens=tokens, config=self.node, data=data, versions=self._versions)

    def wait(self) -> None:
        """Return when the last save is on disk; raises PlaitError where it failed."""
        if self._saver is not None:
            self._saver.wait()

    def export(self) -> None:
        """Write the weights as safetensors into the run's folder `export/`."""
        import torch.distributed as dist

        from plait.checkpoint.export import export
        from plait.checkpoint.state import weights

        state, _ = self.applied.checkpoint()
        export(weights(state), self.folder.path / "export", dist.get_rank() == 0)

    def _states(self) -> list[Any]:
        """The data state of every share, by share; empty where the count of batches says it all."""
        import torch.distributed as dist

        mine = self.batches.state_dict()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self.applied.mesh.share("batch")[0], mine))
        by_share = dict(gathered)
        return [by_share[share] for share in sorted(by_share)] if any(by_share.values()) else []

    def _agree(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides, or the error that it meets, on all ranks."""
        import torch.distributed as dist

        answer: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                answer[0] = decide()
            except PlaitError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise PlaitError(answer[1])
        return answer[0]
