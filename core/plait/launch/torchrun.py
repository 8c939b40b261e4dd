"""The launcher torchrun, and whatever else sets its variables."""

from collections.abc import Mapping

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect(env: Mapping[str, str]) -> bool:
    """PET_NNODES without LOCAL_RANK is an argument for a torchrun that nobody started: Kubeflow sets it, and then RANK
    is the number of a pod."""
    return {"RANK", "WORLD_SIZE"} <= env.keys() and ("LOCAL_RANK" in env or "PET_NNODES" not in env)


def variables(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in VARIABLES if name in env}
