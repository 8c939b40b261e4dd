"""Runs the command `plait` inside this process: a case takes milliseconds, not seconds. No rank starts here."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import attrs

from plait.commands import main as cli
from plait.contract.errors import PlaitError

STARTED = 99  # the exit code where ranks would have been started


@attrs.frozen
class Done:
    code: int
    out: str
    err: str
    error: PlaitError | None = None


def plait(*arguments: str, ranks: Callable[..., Any] | None = None) -> Done:
    """What `plait ARGUMENTS` prints and exits with. An exception that it does not turn into a sentence is raised.

    `ranks` stands in for `plait.launch.launcher.start_ranks`.
    """
    out, err = io.StringIO(), io.StringIO()
    command, errors = cli._command, []

    def noted(given: list[str]) -> int:
        try:
            return command(given)
        except PlaitError as error:
            errors.append(error)
            raise

    with (
        _as_it_was(ranks or _started),
        mock.patch.object(cli, "_command", noted),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        sys.argv = ["plait", *arguments]
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except _Started:
            code = STARTED
    return Done(code, out.getvalue(), err.getvalue(), *errors)


class _Started(BaseException):
    """Here ranks would have been started."""


def _started(*arguments: object) -> None:
    raise _Started


@contextlib.contextmanager
def _as_it_was(start_ranks: Callable[..., Any]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    loggers = [logging.getLogger(name) for name in (None, "hydra")]
    levels = [logger.level for logger in loggers]
    with mock.patch.dict(os.environ), mock.patch("plait.launch.launcher.start_ranks", start_ranks):
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path
            for logger, level in zip(loggers, levels, strict=True):  # `--info` makes Hydra say more
                logger.setLevel(level)
