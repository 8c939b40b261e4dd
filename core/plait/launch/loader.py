"""Makes Hydra compose the config of a run once."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hydra._internal import hydra as internal
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig

from plait.launch.options import Options

AS_RUN = "hydra.mode=RUN"  # what Hydra adds to the overrides once it knows the mode


class Loader(ConfigLoaderImpl):
    """Hydra composes a run twice, the first time only to ask for its mode; here both times get the same config or
    error."""

    _kept: tuple[tuple[str | None, list[str]], DictConfig | Exception] | None = None

    def __init__(self, config_search_path: Any) -> None:
        super().__init__(config_search_path)
        self.repository = Options(config_search_path)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if run_mode == RunMode.MULTIRUN and not validate_sweep_overrides:  # it asks for the mode
            asked = (config_name, [*overrides, AS_RUN])
            try:
                cfg = self.compose(config_name, overrides, RunMode.RUN)
                self._kept = asked, cfg
                return cfg
            except Exception as error:  # of a run; a sweep may be fine
                self._kept = asked, error
        if run_mode == RunMode.RUN and self._kept is not None and self._kept[0] == (config_name, overrides):
            found, self._kept = self._kept[1], None
            if isinstance(found, Exception):
                raise found
            found.hydra.mode = RunMode.RUN
            found.hydra.overrides.hydra.append(AS_RUN)
            return found
        return self.compose(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)

    def compose(
        self, name: str | None, overrides: list[str], mode: RunMode, shell: bool = True, validate: bool = True
    ) -> DictConfig:
        """What Hydra's own loader composes."""
        return super().load_configuration(name, overrides, mode, shell, validate)


@contextlib.contextmanager
def loading(make: Callable[[Any], Loader]) -> Iterator[None]:
    """Inside, Hydra's application composes with the loader that `make` returns for a search path."""
    before, internal.ConfigLoaderImpl = internal.ConfigLoaderImpl, make  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        internal.ConfigLoaderImpl = before  # type: ignore[misc]
