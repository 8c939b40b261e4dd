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
    key = getattr(cause, "full_key", None) or getattr(cause, "key", None)
    first = str(error).strip().splitlines()[0]
    if key is not None and "is not in struct" in str(cause):
        known = _keys_beside(str(key))
        last = str(key).rpartition(".")[2]
        return f"unknown key {key}; there are: {', '.join(known)}{near_miss(last, known)}"
    return first


def _options(group: str) -> list[str]:
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    return list(loader.get_group_options(group)) if loader else []


def _keys_beside(key: str) -> list[str]:
    """The keys of the node that `key` should be in, of the default composition."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig, OmegaConf

    GlobalHydra.instance().clear()
    with initialize_config_module("plait.conf", version_base="1.3"):
        cfg = compose("train")
    node = OmegaConf.select(cfg, key.rpartition(".")[0]) if "." in key else cfg
    return [str(name) for name in node] if isinstance(node, DictConfig) else []


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
