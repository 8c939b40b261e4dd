"""Hydra: what composes a config, what finds an option's file, and the arguments of its command line.

Needs `hydra._internal`: `hydra.ConfigLoaderImpl` (the name by which Hydra's application makes its loader),
`config_loader_impl.ConfigLoaderImpl`, `config_repository.ConfigRepository._find_object_source` and
`utils.get_args_parser`, in Hydra 1.3. Tests: tests/launch/test_loader.py, tests/launch/test_bad_input.py.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hydra._internal import hydra as application
from hydra._internal.config_loader_impl import ConfigLoaderImpl as ConfigLoader
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

__all__ = ["ConfigLoader", "Repository", "arguments_parser", "loading"]


class Repository(ConfigRepository):
    """The files of options; `source` says whose file counts."""

    def source(self, config_path: str) -> Any:
        """The source whose file at `config_path` counts; None if none has it."""
        return super()._find_object_source(config_path, ObjectType.CONFIG)

    def _find_object_source(self, config_path: str, object_type: ObjectType | None) -> Any:
        if object_type == ObjectType.CONFIG:
            return self.source(config_path)
        return super()._find_object_source(config_path, object_type)


def arguments_parser() -> argparse.ArgumentParser:
    """The parser of Hydra's own flags, and of overrides."""
    from hydra._internal.utils import get_args_parser

    return get_args_parser()


@contextlib.contextmanager
def loading(make: Callable[[Any], ConfigLoader]) -> Iterator[None]:
    """Inside, Hydra's application composes with the loader that `make` returns for a search path."""
    before, application.ConfigLoaderImpl = application.ConfigLoaderImpl, make  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        application.ConfigLoaderImpl = before  # type: ignore[misc]
