"""The checkpoints of a run on its ranks: what a save holds, and what a restore loads."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.checkpoint.store import Store, samples_of
from plait.contract.errors import PlaitError
from plait.records.metrics_seal import MetricsSeal
from plait.system.errors import DiskError, one_line, refused

if TYPE_CHECKING:
    from plait.checkpoint.choose import Say
    from plait.checkpoint.copies import MemoryCopies
    from plait.checkpoint.frozen_parameters import Base
    from plait.contract.config import Config
    from plait.data.tokenizer_files import Used
    from plait.parallel.applied import Applied
    from plait.records.run_folder import RunFolder


class Checkpoints:
    """Saves and restores one run on its ranks. All ranks call every method together, but for `due`."""

    def __init__(
        self,
        config: "Config",
        folder: "RunFolder",
        applied: "Applied",
        optimizer: Any,
        data: Mapping[str, Any],
        batches: Any,
        say: "Say",
        tokenizer: "Callable[[], Used | None]" = lambda: None,
    ) -> None:
        import torch.distributed as dist

        from plait.checkpoint.at_address import open_store
        from plait.checkpoint.save import Saver

        self.config, self.conf = config, config.checkpoint
        self.folder, self.applied, self.optimizer = folder, applied, optimizer
        self._tokenizer = tokenizer
        self.data, self.batches, self.say = data, batches, say
        # Weights that some rank must have, if each rank has only some.
        self._known = list(applied.whole.shapes) if applied.whole else []
        self._base: Base | None = None
        self.store = open_store(folder.checkpoints(self.conf.dir))
        self.best: dict[str, Any] | None = None  # the lowest validation loss, its step, and the validations since
        self._saver = Saver(self.store, self.conf.mode, self.conf.keep, say=say) if self.conf.enabled else None
        self._copies = self._in_memory()
        self._saved_at = time.monotonic()
        self._metrics = MetricsSeal(folder.metrics)
        self._grace = config.launch.grace_seconds
        self._versions = folder.read_versions()
        if dist.get_rank() == 0:
            folder.write_versions({**self._versions, "data": data["fingerprint"]})

    def _in_memory(self) -> "MemoryCopies | None":
        """None unless the config asks for copies, and the launcher has memory for them."""
        if self.conf.memory_steps is None:
            return None
        from plait.checkpoint.copies import MemoryCopies
        from plait.system.held_memory import of_this_machine

        (places, address), layout = of_this_machine(), self.applied.mesh.layout
        divided = f"{layout.world_size}: {layout.dense}, {layout.views}"
        return MemoryCopies(places, address, int(os.environ.get("LOCAL_RANK", "0")), divided) if places else None

    def restore(self) -> tuple[int, int, int]:
        """Load what `checkpoint.load` or `checkpoint.init_from` names; returns the steps, tokens and samples so far."""
        from plait.checkpoint.choose import choose_again, choose_on_ranks, restarted
        from plait.checkpoint.restore import restore

        def newest() -> Path | None:
            if self.store.damaged:
                return choose_again(self.conf, self.store, self.say)
            return choose_on_ranks(self.conf, self.store, self.folder, self.say)

        init_from = self.conf.init_from
        given = (self.store, self.applied, self.optimizer, init_from, newest, self.say)
        path, self._base, copy = restore(*given, self._copies)
        if self._saver is not None:
            self._saver.resumed = path
        if copy is not None:
            self.best = copy["best"]
            if copy["state"]:
                self.batches.load_state_dict(copy["state"])
            self.say(f"checkpoint: resumed after step {copy['step']} from memory")
            return copy["step"], copy["tokens"], copy["samples"]
        if path is None:
            if restarted():
                self.say("checkpoint: there is none to resume; all ranks start over at step 0")
            return 0, 0, 0
        manifest = Store.read(path)
        self.best = manifest.data.get("best") if path.parent == self.store.folder else None
        if manifest.data.get("fingerprint") != self.data["fingerprint"]:
            self.say("data: the text, its tokenizer or the library tokenizers changed; batches may differ from before")
        samples = samples_of(manifest, self.data["global_batch_size"])
        if self.data["shares"] and (states := manifest.data.get("states")):
            self.batches.load_state_dict({str(part): state for part, state in enumerate(states)})
        self.say(f"checkpoint: resumed after step {manifest.step}")
        return manifest.step, manifest.tokens, samples

    def due(self) -> bool:
        """Whether `checkpoint.every_seconds` have passed since the last save, or since the start, by this clock."""
        every = self.conf.every_seconds
        return self._saver is not None and every is not None and time.monotonic() - self._saved_at >= every

    def copies_at(self, step: int) -> bool:
        """Whether the state after `step` is to be copied to memory."""
        return self._copies is not None and step % (self.conf.memory_steps or 1) == 0

    def save(
        self,
        step: int,
        tokens: int,
        samples: int,
        report: Callable[[], None],
        on_disk: bool = True,
        in_memory: bool = False,
    ) -> None:
        """Save the state after `step`; with `checkpoint.mode=async` it is written while training continues.

        report: writes the row of `step`. It is called before anything is saved, because a NaN must not be saved, nor a
        step whose row could be lost; and when the last copy in memory is whole on all ranks, because a run whose rows
        reach `step` promises to go on from that one at least.
        """
        state, _ = self.applied.checkpoint(self.optimizer)
        state, known, frozen = self._base.without(state, self._known) if self._base else (state, self._known, {})
        if in_memory and self._copies is not None:
            position = {"step": step, "tokens": tokens, "samples": samples, "best": self.best}
            position["state"] = self.batches.state_dict()
            self._copies.save(state, position, report)
        else:
            report()
        if not on_disk:
            return
        assert self._saver is not None
        self._saved_at = time.monotonic()
        data = {**self.data, **frozen, "samples": samples, "states": self._states(), "metrics": self._metrics.now()}
        data |= {"best": self.best} if self.best else {}
        values, versions = self.config.plain(), self._versions
        self._saver.save(state, step, tokens=tokens, config=values, data=data, versions=versions, known=known)

    def wait(self) -> None:
        """Return when the last save is on disk; raises PlaitError if it failed."""
        if self._saver is not None:
            self._saver.wait()

    def failed(self) -> bool:
        """Whether this rank knows that the current save failed; if one rank knows, all must call `wait`."""
        return self._saver is not None and self._saver.failed()

    @contextlib.contextmanager
    def breaking_off(self) -> Iterator[None]:
        """If an error inside ends the run, completes the current save first; the message for a full disk says what is
        safe."""
        try:
            yield
        except Exception as error:
            if self._saver is not None and (isinstance(error, PlaitError) or refused(error)):
                self._saver.settle(self._grace)
            if not refused(error):
                raise
            told = f"{one_line(error)}; {self.kept()}; fix this and give the same command again"
            raise DiskError(told) from error

    def kept(self) -> str:
        """What a run that ends early can continue from, in words."""
        saved, resumed = (self._saver.saved, self._saver.resumed) if self._saver else (None, None)
        good = resumed if saved is None else self.store.path_of(saved)
        if good is None:
            return "no checkpoint was saved yet"
        name = good.name if good.parent == self.store.folder else good
        return f"the last good checkpoint is kept: {name}" if good.is_dir() else f"the checkpoint {name} is gone"

    def where_to_go_on(self) -> str:
        """What a run that is no longer finite can continue from, in words, after the current save has ended.

        Raises PlaitError if that save fails: its reason is the earlier one.
        """
        from plait.checkpoint import finite

        self.wait()
        saver = self._saver
        return finite.where_to_go_on(self.store, *((saver.resumed, saver.saved) if saver else ()))

    def export(self, doing: Callable[[str], None] = lambda what: None) -> str:
        """Write weights as safetensors into the run's folder `export/`, and a copy beside checkpoints at an address.
        Returns where they are, in words. doing: gets what is done, before each part that may take long."""
        from plait.checkpoint.export_at_address import export_and_copy

        return export_and_copy(self.applied, self.folder.path, self.store.folder, self._known, self._tokenizer, doing)

    def _states(self) -> list[Any]:
        """The state of every part of a stream, in order; empty if the number of samples is enough."""
        import torch.distributed as dist

        if not self.data["shares"]:
            return []
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.batches.state_dict())
        by_part = {int(part): state for states in gathered for part, state in states.items()}
        return [by_part[part] for part in sorted(by_part)] if any(by_part.values()) else []
