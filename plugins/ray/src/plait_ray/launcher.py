"""What `plait ray` says of a machine to the `plait train` that it starts there. Imports nothing heavy."""

from collections.abc import Mapping

VARIABLES = {key: f"PLAIT_RAY_{key.upper()}" for key in ("nnodes", "index", "rdzv_endpoint", "nproc_per_node")}


def detect(env: Mapping[str, str]) -> bool:
    return VARIABLES["nnodes"] in env


def machines(env: Mapping[str, str]) -> dict[str, str]:
    return {key: env[name] for key, name in VARIABLES.items() if name in env}
