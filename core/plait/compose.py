"""Hydra's composition, with errors that name what exists and the near miss."""

import os
import sys
from collections.abc import Callable
from typing import Any

from plait.errors import PlaitError, near_miss

CONFIG = "pkg://plait.conf"


def composed(task: Callable[[Any], None], argv: list[str]) -> None:
    """Run `task` as Hydra's application under these arguments: overrides, -m, --cfg job, --info, --config-dir, ...

    Raises PlaitError where the configuration cannot be composed, or the task raised it.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["plait train", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises instead of printing and exiting
    try:
        hydra.main(config_path=CONFIG, config_name="train", version_base="1.3")(task)()
    except HydraException as error:
        raise PlaitError(sentence(error)) from error
    except OmegaConfBaseException as error:
        raise PlaitError(f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}") from error
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]


def sentence(error: Exception) -> str:
    """One sentence for what Hydra says in several lines, with the options that there are."""
    from hydra.errors import MissingConfigException
    from omegaconf import DictConfig
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if group == "strategy":
            from plait.plugins import installed

            options = [name for name, plugin in installed().items() if plugin.state == "ok"]
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
        return f"unknown key {cause.full_key}; there are: {', '.join(known)}{near_miss(str(cause.key), known)}"
    return str(error).strip().splitlines()[0]


def _options(group: str) -> list[str]:
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    return list(loader.get_group_options(group)) if loader else []


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
