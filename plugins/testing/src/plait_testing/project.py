"""A folder in which a test starts `plait` as a user does: the fixture `plait_project`."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from plait import PlaitError
from plait.host import standing_in
from plait_testing.starter import Started, fits, starter
from plait_testing.warm import command

STARTED = 99  # the exit code where ranks would have been started
PLAIT = str(Path(sys.executable).with_name("plait"))
OF_RANKS = (  # which a test that started a process group leaves in this process
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SLURM_PROCID", "SLURM_NTASKS"),
)


@attrs.frozen
class Done:
    """How a command ended. error: what it printed as a sentence, if it ran inside the test's process."""

    code: int
    out: str
    err: str
    error: PlaitError | None = None


class Project:
    """What the fixture `plait_project` gives: it starts the command `plait` in the current folder.

    path: of the folder, which the fixture has made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(
        self,
        *arguments: str,
        ranks: int | Callable[..., Any] | None = 0,
        cold: bool = False,
        cwd: Path | None = None,
        timeout: float = 240,
        **env: str,
    ) -> Done:
        """How `plait ARGUMENTS` ends: `code`, `out`, `err`, and `error`, the PlaitError that it printed.

        ranks: how many train, in processes of their own, on the CPU; None: as many as the command says; 0: none. Then
        the command runs inside the test's process, takes milliseconds, and ends with the code 99 where it would start
        ranks; what it printed as an error is `error`, and an exception that it does not turn into a sentence is raised.
        A function stands in there for what starts ranks.
        cold: in a new interpreter, not in a fork of one that has imported torch.
        cwd: another folder.
        timeout: seconds after which a command in a process of its own is killed.
        env: environment variables.
        """
        if not cold and (callable(ranks) or ranks == 0):
            with contextlib.chdir(cwd or Path.cwd()), mock.patch.dict(os.environ, env):
                return _inside(arguments, ranks if callable(ranks) else _started)
        where, whole, given = cwd or Path.cwd(), environment(**env), _of(arguments, ranks)
        if fits(whole) and not cold:
            done = starter().run(given, where, whole, timeout)
        else:
            done = subprocess.run(
                [PLAIT, *given],
                cwd=where,
                env=whole,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                encoding="utf-8",
            )
        return Done(done.returncode, done.stdout, done.stderr)

    def start(
        self, *arguments: str, ranks: int | None = None, cold: bool = False, cwd: Path | None = None, **env: str
    ) -> "subprocess.Popen[str] | Started":
        """The same in the background, in a process group of its own, as `subprocess.Popen` does."""
        where, whole, given = cwd or Path.cwd(), environment(**env), _of(arguments, ranks)
        process: subprocess.Popen[str] | Started
        if fits(whole) and not cold:
            process = starter().begin(given, where, whole)
        else:
            process = subprocess.Popen(
                [PLAIT, *given],
                cwd=where,
                env=whole,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                encoding="utf-8",
            )
        return process

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of the run `name`."""
        text = Path("runs", name, "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def environment(**more: str) -> dict[str, str]:
    """That of a command on one thread, without what ranks left in this process."""
    return {**{k: v for k, v in os.environ.items() if k not in OF_RANKS}, "OMP_NUM_THREADS": "1", **more}


def _of(arguments: tuple[str, ...], ranks: int | Callable[..., Any] | None) -> list[str]:
    if callable(ranks):
        raise TypeError("a function stands in for ranks only inside the test's process: leave `cold` out")
    return [*arguments, *((f"launch.nproc_per_node={ranks}", "launch.device=cpu") if ranks else ())]


def _inside(arguments: tuple[str, ...], ranks: Callable[..., Any]) -> Done:
    out, err, said = io.StringIO(), io.StringIO(), None
    with (
        _as_it_was(ranks),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        sys.argv = ["plait", *arguments]
        try:
            command()()
            code = 0
        except SystemExit as end:
            code, said = int(end.code or 0), end.__context__  # the error that it ended by
        except _Started:
            code = STARTED
    return Done(code, out.getvalue(), err.getvalue(), said if isinstance(said, PlaitError) else None)


class _Started(BaseException):
    """Here ranks would have been started."""


def _started(*arguments: object) -> None:
    raise _Started


@contextlib.contextmanager
def _as_it_was(start_ranks: Callable[..., Any]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    loggers = [logging.getLogger(name) for name in (None, "hydra")]
    levels = [logger.level for logger in loggers]
    with mock.patch.dict(os.environ), standing_in(start_ranks):
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path
            for logger, level in zip(loggers, levels, strict=True):  # `--info` makes Hydra say more
                logger.setLevel(level)
