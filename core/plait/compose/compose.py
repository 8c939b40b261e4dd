"""Hydra's composition, with errors that name what exists and the near miss."""

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from plait.compose.foreign import unknown
from plait.compose.quoting import advice, for_shell, quoted
from plait.contract.absent import AbsentPackage, absent_option
from plait.contract.cluster import Cluster
from plait.contract.config import Config
from plait.contract.errors import PlaitError, near_miss
from plait.contract.kinds import KINDS
from plait.system.errors import one_line
from plait.system.signals import stop_behind

CONFIG = "pkg://plait.conf"
SWEEP = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'(?: requires --multirun)?$")


class _SweepFailed(BaseException):
    """Ends a sweep: Hydra lets it pass, but prints a line of its own for an Exception."""


def composed(task: Callable[[Any], Any], argv: list[str], make: Callable[[Any], Any] | None = None) -> None:
    """Run `task` as Hydra's application under these arguments: overrides, -m, --cfg job, --info, --config-dir, ...
    In a sweep Hydra's sweeper gets what it returns. make: makes the loader of configs, of a search path.

    Raises PlaitError if the configuration cannot be composed, or if the task raised it.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import MissingConfigException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from plait.compose.hydra_internals import loading
    from plait.compose.loader import Loader
    from plait.compose.overrides import check_arguments

    raised: list[Exception] = []

    @functools.wraps(task)
    def quiet(cfg: Any) -> Any:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            try:
                return task(cfg)
            except Exception as error:
                if not isinstance(error, PlaitError) and (stop := stop_behind(error)):
                    raise stop from None
                raise _SweepFailed(one_line(error)) from None
        try:
            task(cfg)
        except Exception as error:  # kept from Hydra, which would print its own line first
            raised.append(error)

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    program = "plait" if "-sc" in argv or "--shell-completion" in argv else "plait train"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of print and exit
    try:
        check_arguments(argv)
        standing_in = list[str]()
        while True:
            sys.argv = [program, *argv, *standing_in]
            try:
                with loading(make or Loader):
                    hydra.main(config_path=CONFIG, config_name="train", version_base="1.3")(quiet)()
                break
            except MissingConfigException as error:
                if not (named := _for_default(explained(error), argv)):
                    raise
                standing_in += named
    except PlaitError:
        raise
    except _SweepFailed as end:
        raise PlaitError(str(end)) from None
    except Exception as error:
        if stop := stop_behind(error):
            raise stop from None
        raise _quoting(_naming(explained(error), argv), argv) from error
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
    for problem in raised:
        if not isinstance(problem, PlaitError) and (stop := stop_behind(problem)):
            raise stop
        if isinstance(problem, OmegaConfBaseException):
            raise _quoting(explained(problem), argv) from problem
        raise _quoting(problem, argv) if isinstance(problem, PlaitError) else problem


def _for_default(error: PlaitError, argv: list[str]) -> list[str]:
    """Overrides that leave out the default that `error` is about, if its package is absent and nobody asked for it.

    Its name stands in for its target: who needs a model, or data, then says which package is absent.
    """
    asked = {re.split(r"[=@]", argument.lstrip("+~"))[0] for argument in argv}
    if not isinstance(error, AbsentPackage) or error.key in asked:
        return []
    return [f"~{error.key}", f"+{error.key}._target_={error.value}"]


def explained(error: Exception) -> PlaitError:
    """Hydra's message of several lines as one sentence, with the available options."""
    from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
    from omegaconf import DictConfig
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "See http" not in line]
    if isinstance(error, OverrideParseException):
        return _unread(str(error.override))
    if isinstance(error, ConfigCompositionException) and (found := SWEEP.match(lines[0])):
        key, _, values = found[1].partition("=")
        said = f"{found[1]} is a sweep, which has the flag -m; one text is written in quotes: {quoted(key, values)}"
        a_list = f"; a list, {for_shell(f'{key}=[{values}]')}" if lines[0].startswith("Ambiguous") else ""
        return PlaitError(said + a_list).at(key, values)
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        kind = next((kind for kind in KINDS.values() if kind.choice == group and kind.node), None)
        if kind is not None:
            from plait.strategies.registry import installed

            plugins = installed(kind.name)
            if not option:
                none = f"{group}=[] for no {group}" if kind.several else f"~{group} for the core's own"
                return PlaitError(f"{group}= is empty; write {none}").at(
                    group, fits="[]" if kind.several else f"~{group}"
                )
            if option in plugins:
                if plugins[option].state != "ok":
                    return PlaitError(f"{plugins[option]} cannot be used: {plugins[option].state}").at(group, option)
                said = f"{plugins[option]} has no conf/{group}/{option}.yaml in its package {plugins[option].package}"
                return PlaitError(said).at(group, option)
            options = [name for name, plugin in plugins.items() if plugin.state == "ok"]
            what = "is not installed; installed"
        else:
            options = list(error.options or []) or _options(group)
            if absent := absent_option(group, option, options):
                return absent
            what = "does not exist; available"
        said = f"{group}={option} {what}: {', '.join(options) or 'none'}{near_miss(option, options)}"
        return PlaitError(said).at(group, option, options)
    if isinstance(error, ConfigCompositionException) and (chosen := _wrongly_signed(lines)) is not None:
        return chosen
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    # Under a debugger OmegaConf tells its own causes too.
    absent_keys = (each for each in causes if isinstance(each, ConfigAttributeError | ConfigKeyError))
    cause = next((each for each in absent_keys if isinstance(each.parent_node, DictConfig)), None)
    if cause is not None:
        known = [str(name) for name in cause.parent_node]
        node = str(cause.full_key).rpartition(".")[0]
        if kind := next((kind for kind in KINDS.values() if kind.node and kind.node == node), None):
            selected = ", ".join(known) or "none"
            said = f"{cause.full_key}: {kind.name} {cause.key!r} is not selected; selected: {selected}"
            return PlaitError(said).at(str(cause.full_key), fits=known)
        return unknown(str(cause.full_key), known)
    if isinstance(error, OmegaConfBaseException):
        return PlaitError(f"{error.full_key or 'configuration'}: {lines[0]}").at(str(error.full_key))
    if isinstance(error, MissingConfigException):
        return PlaitError(lines[0])  # the rest is a search path
    return PlaitError(" ".join(lines) if isinstance(error, HydraException) else one_line(error))


def _wrongly_signed(lines: list[str]) -> PlaitError | None:
    """The error for an option that is chosen with a plus, where its group has a default, or without, where it has
    none; None if Hydra's lines are about something else."""
    told = " ".join(lines)
    if added := re.match(r"Could not override '(.+?)'\. No match .* use \+(.*)$", told):
        group, options = added[1], added[2].partition("=")[2].replace("'", "").replace(", ", ",")
        override = for_shell(f"+{group}={options or 'NAME'}")
        return PlaitError(f"{group} is added with a plus: {override}").at(group, options, fits=override)
    if dropped := re.match(r"Could not delete '(.+?)'\. No match in the defaults list", told):
        group = dropped[1].partition("=")[0]
        return PlaitError(f"~{group}: no {group} is chosen, so there is none to leave out").at(group)
    if again := re.match(r"Multiple values for (\S+)\. To override|(\S+) appears more than once in the final", told):
        group = (again[1] or again[2]).lstrip("/")
        how = f"write {group}=NAME without a plus, or in a file's defaults `override /{group}: NAME`"
        return PlaitError(f"{group} is chosen more than once; to replace what is chosen, {how}").at(group)
    return None


def _unread(override: str) -> PlaitError:
    """The error for an override that Hydra's grammar does not take."""
    if how := advice(override):
        why, words = how
        said = f"{override} cannot be read: {why}; in a shell, write {words}"
        return PlaitError(said).at(override, fits="key=value")
    key, equals, _ = override.partition("=")
    if equals and (strange := re.search(r"[^\w.\-/@+~]", key, re.ASCII)):
        said = f"{override!r} is not an override: its key has {strange[0]!r}, which no key has"
        return PlaitError(said).at(override, fits="a key of letters, digits, dots and underscores")
    return PlaitError(f"{override!r} is not an override: write key=value").at(override, fits="key=value")


def _quoting(error: PlaitError, argv: list[str]) -> PlaitError:
    """`error`, which also says how to write the text that was meant, if an argument was read as something else."""
    for argument in argv:
        key, _, value = argument.lstrip("+").partition("=")
        if not (key and value and key == error.key):
            continue
        other = str(error.fits).startswith("text") and not isinstance(error.value, str)
        unknown = re.search(r"\$\{[\w.]*\}", value) and "nterpolation" in str(error)
        if other or unknown:
            error.args = (f"{error}; if the text {value} is meant, write it in quotes: {quoted(key, value)}",)
    return error


def _naming(error: PlaitError, argv: list[str]) -> PlaitError:
    """`error`, which also names the arguments that caused it if its sentence has none of them."""
    if isinstance(error, AbsentPackage):  # of a default, as often as not
        return error
    keys = [re.split(r"[=.@]", argument.lstrip("+~"))[0] for argument in argv]
    if not any(key and key in str(error) for key in keys):
        error.args = (f"{error} (from {' '.join(argv)})",)
    return error


def _options(group: str) -> list[str]:
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    return list(loader.get_group_options(group)) if loader else []


def compose(overrides: list[str]) -> Config:
    """The config of one run under these overrides; accepts `--config-dir DIR`.

    Raises PlaitError if it cannot be composed, or if a value does not fit.
    """
    caught: list[Config] = []
    composed(lambda composition: caught.append(config_of(composition)), overrides)
    return caught[-1]


def config_of(composition: Any) -> Config:
    """The config of what Hydra composed. Raises PlaitError, naming the key, for what a run does not take."""
    from omegaconf import OmegaConf

    from plait.strategies.registry import usable

    for kind in KINDS.values():
        if kind.node and not kind.several and isinstance(chosen := composition.get(kind.choice), str):
            usable(chosen, kind.name)  # no package has a group of such options, so Hydra took the name for a value
    config = Config.of(OmegaConf.to_container(composition, resolve=True), whole=True)  # type: ignore[arg-type]
    if config.launch.mode not in KINDS["launcher"].words:
        usable(config.launch.mode, "launcher")
    Cluster.of(config.cluster)
    return config
