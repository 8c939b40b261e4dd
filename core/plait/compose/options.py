"""Finds an option's file: the user's own one comes first, and two packages may not both define it."""

import copy
import importlib.resources
import os
from pathlib import Path
from typing import Any

from plait.compose.hydra_internals import Repository
from plait.contract.errors import PlaitError
from plait.strategies.shipped import defined_twice

_LOADED: dict[tuple[str, str, int], Any] = {}  # (provider, file, when it was written) -> what a file says
USERS = ("./conf", "hydra.searchpath", "command-line")  # how the providers of the user's folders begin


class Options(Repository):
    """Hydra's own repository takes the first file on its path, whoever else has one of that name.

    Here ./conf, `hydra.searchpath` and --config-dir come before installed packages, the last of them first.
    """

    def __init__(self, search_path: Any) -> None:
        super().__init__(search_path)
        self._known: dict[str, list[Any]] = {}  # an option's path -> the sources that have it

    def __deepcopy__(self, memo: Any) -> "Options":
        """Hydra wants a copy whose sources it replaces, at each composition; to copy these too takes a tenth of it."""
        copied = copy.copy(self)
        copied._known = {}
        return copied

    def load_config(self, config_path: str) -> Any:
        """Raises PlaitError if it is an option of two packages, and the user has none of that name."""
        if "/" in config_path and len(places := self._places(config_path)) > 1:
            named = [("plait" if by == "main" else by, file) for file, by in places.items()]
            group, _, option = config_path.rpartition("/")
            raise PlaitError(defined_twice(config_path, named)).at(group, option)
        source = self.source(config_path)
        if source is None or not (file := _file(source, config_path)):
            return super().load_config(config_path)
        key = source.provider, file, os.stat(file).st_mtime_ns
        if key not in _LOADED:
            _LOADED[key] = super().load_config(config_path)
        return copy.deepcopy(_LOADED[key])

    def source(self, config_path: str) -> Any:
        return self._own(config_path) or next(iter(self._having(config_path)), None)

    def _own(self, config_path: str) -> Any:
        """The user's folder that has this option; None if there is none."""
        having = self._having(config_path) if "/" in config_path else []
        return next((source for source in reversed(having) if source.provider.startswith(USERS)), None)

    def _places(self, config_path: str) -> dict[str, str]:
        """The file -> who ships it, if the user has none."""
        if self._own(config_path):
            return {}
        places: dict[str, str] = {}
        for source in self._having(config_path):
            if file := _file(source, config_path):
                places.setdefault(os.path.realpath(file), source.provider)
        return places

    def _having(self, config_path: str) -> list[Any]:
        """Those that have it, in order; asked once, since each of Hydra's sources resolves every link on its path."""
        if config_path not in self._known:
            self._known[config_path] = [source for source in self.sources if _has(source, config_path)]
        return self._known[config_path]


def _has(source: Any, config_path: str) -> bool:
    file = _file(source, config_path)
    return os.path.isfile(file) if file else source.is_config(config_path)


def _file(source: Any, config_path: str) -> str:
    """Where its file of that option would be; empty for what lies in no folder."""
    folder = source.path
    if source.scheme() == "pkg":
        try:
            folder = importlib.resources.files(source.path)
        except (ValueError, ModuleNotFoundError, TypeError):  # as Hydra, which takes it for empty
            return ""
    elif source.scheme() != "file":
        return ""
    return os.path.join(folder, f"{config_path.removesuffix('.yaml')}.yaml") if isinstance(folder, str | Path) else ""
