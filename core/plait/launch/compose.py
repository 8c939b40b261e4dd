"""Hydra's composition, with errors that name what exists and the near miss."""

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from plait.contract.errors import PlaitError, near_miss, one_line

CONFIG = "pkg://plait.conf"


class _Ends(BaseException):
    """Ends a sweep: Hydra lets it pass, and prints a line of its own for an Exception."""


def composed(task: Callable[[Any], Any], argv: list[str]) -> None:
    """Run `task` as Hydra's application under these arguments: overrides, -m, --cfg job, --info, --config-dir, ...
    In a sweep Hydra's sweeper gets what it returns.

    Raises PlaitError where the configuration cannot be composed, or the task raised it.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from plait.launch.overrides import check_arguments

    raised: list[Exception] = []

    @functools.wraps(task)
    def quiet(cfg: Any) -> Any:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            try:
                return task(cfg)
            except Exception as error:
                raise _Ends(one_line(error)) from None
        try:
            task(cfg)
        except Exception as error:  # kept from Hydra, which would print a line of its own first
            raised.append(error)

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["plait" if "-sc" in argv or "--shell-completion" in argv else "plait train", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises instead of printing and exiting
    try:
        check_arguments(argv)
        hydra.main(config_path=CONFIG, config_name="train", version_base="1.3")(quiet)()
    except PlaitError:
        raise
    except _Ends as end:
        raise PlaitError(str(end)) from None
    except Exception as error:
        raise PlaitError(_naming(sentence(error), argv)) from error
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
    for problem in raised:
        if isinstance(problem, OmegaConfBaseException):
            raise PlaitError(sentence(problem)) from problem
        raise problem


def sentence(error: Exception) -> str:
    """One sentence for what Hydra says in several lines, with the options that there are."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf import DictConfig
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "See http" not in line]
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is no override ({lines[-1]}): write key=value"
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if group == "strategy":
            from plait.strategies.registry import installed

            plugins = installed()
            if not option:
                return "strategy= names none; write strategy=[] for no strategy"
            if option in plugins:
                return f"{plugins[option]} has no conf/strategy/{option}.yaml in its package {plugins[option].package}"
            options = [name for name, plugin in plugins.items() if plugin.state == "ok"]
            what = "is not installed; installed"
        else:
            options = list(error.options or []) or _options(group)
            what = "does not exist; there are"
        return f"{group}={option} {what}: {', '.join(options) or 'none'}{near_miss(option, options)}"
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        known = [str(name) for name in cause.parent_node]
        if str(cause.full_key).rpartition(".")[0] == "strategy":
            selected = ", ".join(known) or "none"
            return f"{cause.full_key}: strategy {cause.key!r} is not among the selected ones; there are: {selected}"
        return f"unknown key {cause.full_key}; there are: {', '.join(known)}{near_miss(str(cause.key), known)}"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'configuration'}: {lines[0]}"
    if isinstance(error, MissingConfigException):
        return lines[0]  # the rest is a search path
    return " ".join(lines) if isinstance(error, HydraException) else one_line(error)


def _naming(text: str, argv: list[str]) -> str:
    """`text`, with the arguments that it came from if it names none of them."""
    keys = [re.split(r"[=.@]", argument.lstrip("+~"))[0] for argument in argv]
    return text if any(key and key in text for key in keys) else f"{text} (from {' '.join(argv)})"


def _options(group: str) -> list[str]:
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    return list(loader.get_group_options(group)) if loader else []


def asked(argv: list[str], command: str, least: int = 1) -> tuple[list[str], int | None]:
    """(overrides, N of world=N where it was given), for a subcommand that takes these and no flag of `plait train`."""
    if flags := [a for a in argv if a.startswith("-") and a not in ("--config-dir", "-cd")]:
        raise PlaitError(f"plait {command} takes overrides, --config-dir and world=N; {flags[0]} is for plait train")
    worlds = [a.partition("=")[2] for a in argv if a.startswith("world=")]
    if worlds and not (worlds[-1].isdigit() and int(worlds[-1]) >= least):
        raise PlaitError(f"world={worlds[-1]} must be a number of ranks, at least {least}, such as world=4")
    return [a for a in argv if not a.startswith("world=")], int(worlds[-1]) if worlds else None


def resolve(overrides: list[str]) -> dict[str, Any]:
    """The resolved config of one run under these overrides, as plain values; `--config-dir DIR` is understood.

    Raises PlaitError where it cannot be composed.
    """
    caught: list[dict[str, Any]] = []

    def take(cfg: Any) -> None:
        from omegaconf import OmegaConf

        caught.append(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]

    composed(take, overrides)
    return caught[-1]
