"""The command that a sweep was started with: what its jobs, in whatever process, know of the whole."""

import hashlib
import os
import uuid

import attrs

NOT_COUNTED = ("hydra.", "hydra/", "sweep.")  # how jobs are run is not which jobs they are


@attrs.define
class Command:
    """argv: the arguments. session: this start of it. folder: the sweep's, empty for a single run.
    varied: the keys that set jobs apart."""

    argv: list[str]
    session: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    folder: str = ""
    varied: set[str] = attrs.field(factory=set)

    def digest(self) -> str:
        """Eight hexadecimal digits of the overrides, in whatever order they stand."""
        given = [argument for argument in self.argv if argument not in ("-m", "--multirun")]
        counted = sorted(argument for argument in given if not argument.lstrip("+~").startswith(NOT_COUNTED))
        return hashlib.sha256("\0".join(counted).encode()).hexdigest()[:8]


def follows() -> bool:
    """Whether a launcher started this process as another rank than 0, which leaves the sweep's files alone."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"
