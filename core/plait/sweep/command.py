"""The command that started a sweep: what its jobs, in any process, know about the whole."""

import contextlib
import hashlib
import uuid
from collections.abc import Sequence
from pathlib import Path

import attrs

from plait.contract.errors import PlaitError
from plait.records.ledger import Job
from plait.system.disk import writing
from plait.system.locks import try_lock, unlock

LIVE = ".live"
FAILED = 3  # the exit code of a sweep of which a job failed, and of such a job's process

NOT_COUNTED = ("hydra.", "hydra/", "sweep.")  # how jobs are run does not change which jobs they are


@attrs.define
class Command:
    """argv: the arguments. session: this start of it. folder: the sweep's, empty for a single run.
    varied: the keys in which jobs differ. total: how many jobs there are, if that is known. follows: a launcher started
    this process as a rank other than 0, which does not write the sweep's files."""

    argv: list[str]
    session: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    folder: str = ""
    varied: set[str] = attrs.field(factory=set)
    total: int | None = None
    follows: bool = False
    _held: int | None = attrs.field(default=None, init=False)

    def hold(self) -> None:
        """Keep other commands out of the sweep's folder, until `let_go` or this process ends.

        Raises PlaitError if a command runs this sweep already, or if the folder cannot be created.
        """
        if self._held is not None:  # with hydra.verbose, Hydra composes a sweep several times
            return
        place = Path(self.folder)
        with writing(place, "the sweep's folder"):
            place.mkdir(parents=True, exist_ok=True)
            self._held = try_lock(place / LIVE)
        if self._held is None:
            raise PlaitError(
                f"the sweep in {place} is already running; wait for it, or set another hydra.sweep.dir"
            ).at("hydra.sweep.dir", str(place), fits="another folder")

    def let_go(self) -> None:
        """A folder in which no job began is removed."""
        if self._held is None:
            return
        place = Path(self.folder)
        if not (place / "sweep.json").exists():
            with contextlib.suppress(OSError):
                (place / LIVE).unlink()
                (place / "multirun.yaml").unlink(missing_ok=True)  # Hydra writes it before it composes the jobs
                place.rmdir()
        unlock(self._held)
        self._held = None

    def own(self, jobs: Sequence[Job]) -> list[Job]:
        """Those that belong to this start of the sweep."""
        return [job for job in jobs if job.session == self.session]

    def digest(self) -> str:
        """Eight hexadecimal digits computed from the overrides, independent of their order."""
        given = [argument for argument in self.argv if argument not in ("-m", "--multirun")]
        counted = sorted(argument for argument in given if not argument.lstrip("+~").startswith(NOT_COUNTED))
        return hashlib.sha256("\0".join(counted).encode()).hexdigest()[:8]
