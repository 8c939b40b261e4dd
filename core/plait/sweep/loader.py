"""Makes Hydra compose a sweep's jobs so that a strategy's options apply to the jobs that select it."""

import logging
import math
from collections.abc import Callable
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from plait.compose.loader import Loader
from plait.compose.overrides import LISTS, check_sweep, parsed
from plait.compose.train_help import train_help
from plait.contract.errors import PlaitError, near_miss
from plait.launch.launched import rank_here
from plait.sweep.beside import is_beside, run_apart
from plait.sweep.command import Command
from plait.sweep.submitted import QUEUE, is_submitted


class JobLoader(Loader):
    """Composes the whole sweep, which it reports to `command`, and each job of it; a single run as Hydra does."""

    def __init__(self, config_search_path: Any, command: Command) -> None:
        super().__init__(config_search_path=config_search_path)
        self.command, self._of_a_sweep = command, False
        self._selected: dict[tuple[str, ...], set[str]] = {}

    def compose(
        self, name: str | None, overrides: list[str], mode: RunMode, shell: bool = True, validate: bool = True
    ) -> DictConfig:
        def load(those: list[str]) -> DictConfig:
            return super(JobLoader, self).compose(name, those, mode, shell, validate)

        options = {o.input_line: o for o in parsed(overrides) if _plugin_of(o)}
        whole = mode == RunMode.MULTIRUN
        if not (whole or self._of_a_sweep) or not (options or whole):
            return load(overrides)
        rest = [line for line in overrides if line not in options]
        if not whole:
            selected = self._selects(rest, load)
            return load([line for line in overrides if line in rest or _plugin_of(options[line]) in selected])
        cfg = load(rest)
        if validate:  # otherwise Hydra only asks for the mode
            self._begin(cfg, name, rest, list(options.values()))
            cfg.hydra.overrides.task = [o.input_line for o in parsed(overrides) if not o.is_hydra_override()]
        return cfg

    def _selects(self, overrides: list[str], load: Callable[[list[str]], DictConfig]) -> set[str]:
        """The plugins of a job with these overrides, such as "strategy.ring", from the overrides of groups."""
        given = [(o.key_or_group, str(o.input_line)) for o in parsed(overrides)]
        groups = tuple(line for key, line in given if key.startswith(LISTS) or self.repository.group_exists(key))
        if groups not in self._selected:
            self._selected[groups] = _selected(load(overrides))
        return self._selected[groups]

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        self._of_a_sweep = True
        try:
            return super().load_sweep_config(master_config, sweep_overrides)
        finally:
            self._of_a_sweep = False

    def _begin(self, cfg: DictConfig, name: str | None, rest: list[str], options: list[Override]) -> None:
        """Check what every job has in common, fix the sweep's folder, and note in which keys jobs differ."""
        params = OmegaConf.select(cfg, "hydra.sweeper.params") or {}
        given = parsed([f"{key}={value}" for key, value in params.items()])
        plain = parsed(rest)
        self.command.total = self._count(cfg.hydra.sweeper, [*given, *plain, *options])
        options = [*options, *(o for o in given if _plugin_of(o))]
        others = [o for o in [*given, *plain] if not _plugin_of(o)]
        self._check_options(name, others, options, _selected(cfg))
        self.command.varied = {o.get_key_element() for o in [*others, *options] if o.is_sweep_override()}
        self.command.folder = str(cfg.hydra.sweep.dir)
        if OmegaConf.is_interpolation(cfg.hydra.sweep, "dir"):  # jobs may start elsewhere, and later
            quoted = self.command.folder.replace("\\", "\\\\").replace('"', '\\"')
            cfg.hydra.overrides.hydra.append(f'hydra.sweep.dir="{quoted}"')
            cfg.hydra.sweep.dir = self.command.folder
        check_sweep(self.command.folder, "hydra.sweep.dir")
        mode = "auto" if cfg.launch.mode == "local" else cfg.launch.mode  # srun may start one process per machine
        self.command.follows = bool(rank_here(cfg.launch, mode))
        if not self.command.follows:
            self.command.hold()
            if is_submitted(cfg.hydra):
                QUEUE.watch(self.command)
            elif is_beside(cfg.hydra):
                run_apart(self.command)

    def _count(self, sweeper: DictConfig, overrides: list[Override]) -> int | None:
        """How many jobs a sweeper makes of these, the last of a key; None if it does not say."""
        if not str(sweeper.get("_target_")).endswith(".BasicSweeper"):
            return sweeper.get("n_trials") if isinstance(sweeper.get("n_trials"), int) else None
        counts = {}
        for override in overrides:
            override.config_loader = self  # for glob(...)
            several = override.is_discrete_sweep()
            counts[override.get_key_element()] = len(list(override.sweep_string_iterator())) if several else 1
        return math.prod(counts.values())

    def _check_options(
        self, name: str | None, others: list[Override], options: list[Override], selected: set[str]
    ) -> None:
        """Raises PlaitError for an option of a plugin that no job selects, and Hydra's errors for unknown names."""

        def compose(lines: list[str]) -> DictConfig:
            return super(JobLoader, self).compose(name, lines, RunMode.RUN)

        swept = [o for o in others if o.is_sweep_override()]
        plain = [str(o.input_line) for o in others if not o.is_sweep_override()]
        for override in swept:
            if override.is_discrete_sweep() and self.repository.group_exists(override.key_or_group):
                for value in override.sweep_string_iterator():
                    selected |= _selected(compose([*plain, f"{override.get_key_element()}={value}"]))
        for option in options:
            plugin, line = _plugin_of(option), option.input_line
            node, _, chosen = plugin.partition(".")
            if plugin not in selected:
                known = sorted(each.removeprefix(f"{node}.") for each in selected if each.startswith(f"{node}."))
                raise PlaitError(
                    f"{line}: no job of the sweep selects {node} {chosen!r}; they select: {', '.join(known) or 'none'}"
                    f"{near_miss(chosen, known)}"
                ).at(plugin, fits=known)
            one = f"{option.get_key_element()}=null" if option.is_sweep_override() else str(line)
            compose([f"{node}=[{chosen}]", one])


def job_loader(command: Command) -> Callable[[Any], JobLoader]:
    """What makes the loader of a command, whose digest configs may use."""
    logging.getLogger("hydra_plugins").addHandler(logging.NullHandler())  # the table says which jobs failed
    OmegaConf.register_new_resolver("digest", command.digest, replace=True)
    OmegaConf.register_new_resolver("train_help", train_help, replace=True)
    return lambda config_search_path: JobLoader(config_search_path, command)


def _selected(config: DictConfig) -> set[str]:
    """The plugins that a config selects, such as "strategy.ring"."""
    return {f"{node}.{name}" for node in LISTS for name in config[node] or ()}


def _plugin_of(override: Override) -> str:
    """The plugin whose option it sets, such as "strategy.ring"; empty if it is not such an option."""
    node, _, rest = override.key_or_group.partition(".")
    its_own = node in LISTS and not (override.is_add() or override.is_delete())
    return f"{node}.{rest.partition('.')[0]}" if its_own and rest else ""
