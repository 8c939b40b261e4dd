"""Makes Hydra compose the config of a run once."""

import contextlib
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from plait.compose.hydra_internals import ConfigLoader
from plait.compose.options import Options
from plait.contract.errors import PlaitError

HARDWARE = "hardware"  # the group of files that suit a kind of machine
AS_RUN = "hydra.mode=RUN"  # what Hydra adds to the overrides once it knows the mode


class Loader(ConfigLoader):
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
            kept, self._kept = self._kept[1], None
            if isinstance(kept, Exception):
                raise kept
            kept.hydra.mode = RunMode.RUN
            kept.hydra.overrides.hydra.append(AS_RUN)
            return kept
        return self.compose(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)

    def compose(
        self, name: str | None, overrides: list[str], mode: RunMode, shell: bool = True, validate: bool = True
    ) -> DictConfig:
        """What Hydra's own loader composes, except that a hardware file sets nothing that a strategy decides."""
        config = super().load_configuration(name, overrides, mode, shell, validate)
        plain = [override for override in overrides if override.lstrip("+").partition("=")[0] != HARDWARE]
        if mode == RunMode.RUN and len(plain) < len(overrides) and (keys := _decided(config)):
            without = super().load_configuration(name, plain, mode, shell, validate)
            for key in keys:
                OmegaConf.update(config, key, OmegaConf.select(without, key))
        return config


def _decided(config: DictConfig) -> list[str]:
    """The keys that the selected strategies decide: they say so in their class attribute `decides`."""
    from plait.strategies.registry import load

    keys: list[str] = []
    for name in config.get("strategy") or ():
        with contextlib.suppress(PlaitError):  # the check names what is wrong with it
            keys += getattr(load(name), "decides", ())
    return keys
