"""Finds an option's file: the user's own one comes first, and two packages may not both define it."""

import copy
import importlib.resources
import os
from typing import Any

from plait.compose.hydra_internals import Repository
from plait.contract.errors import PlaitError
from plait.strategies.shipped import defined_twice

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
        return super().load_config(config_path)

    def preferred(self, config_path: str) -> Any:
        return self._own(config_path) or next(iter(self._folders(config_path)), None) if "/" in config_path else None

    def _own(self, config_path: str) -> Any:
        """The user's folder that has it; None if there is none."""
        return next((s for s in reversed(self._folders(config_path)) if s.provider.startswith(USERS)), None)

    def _places(self, config_path: str) -> dict[str, str]:
        """The file -> who ships it, if the user has none."""
        if self._own(config_path):
            return {}
        places: dict[str, str] = {}
        for source in self._folders(config_path):
            base = importlib.resources.files(source.path) if source.scheme() == "pkg" else source.path
            places.setdefault(os.path.realpath(os.path.join(str(base), f"{config_path}.yaml")), source.provider)
        return places

    def _folders(self, config_path: str) -> list[Any]:
        """Those that have it, in order; asked once, since each of Hydra's sources resolves every link on its path."""
        if config_path not in self._known:
            self._known[config_path] = [source for source in self.sources if _has(source, config_path)]
        return self._known[config_path]


def _has(source: Any, config_path: str) -> bool:
    if source.scheme() == "file":
        return os.path.isfile(os.path.join(source.path, f"{config_path.removesuffix('.yaml')}.yaml"))
    return source.scheme() == "pkg" and source.is_config(config_path)
