"""The launcher torchrun, and whatever else sets its variables."""

from collections.abc import Mapping

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect(env: Mapping[str, str]) -> bool:
    return {"RANK", "WORLD_SIZE"} <= env.keys()


def variables(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in VARIABLES if name in env}
