"""The launcher of Slurm, srun; and what to say in a job of Slurm whose tasks srun did not start."""

import os
import re
from collections.abc import Mapping

from plait.launch.launched import number

SHELLS = {"4294967290", "4294967291"}  # steps that are the shell of an interactive session, or of a script


def detect(env: Mapping[str, str]) -> bool:
    """Whether srun started it as one of several tasks.

    The shell of a batch script or of an interactive session has the variables of task 0, but is none: the first has no
    step, the second a step with one task; both may have a number that Slurm keeps for them.
    """
    tasks = _tasks(env)
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= env.keys() or env["SLURM_STEP_ID"] in SHELLS:
        return False
    return tasks is not None and number(env, tasks, 1) > 1


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """What the user sets of MASTER_ADDR, MASTER_PORT and LOCAL_WORLD_SIZE stays."""
    world = number(env, _tasks(env) or "SLURM_NTASKS", 1)
    nodes = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in env), None)
    alone = nodes is not None and number(env, nodes, 1) == 1
    job, step = (number(env, name, 0) if name in env else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "MASTER_ADDR": "localhost" if alone else _first_machine(env),
        "MASTER_PORT": str(20000 + (job + 4999 * step) % 20000),  # two steps of a job may run side by side
        **({"LOCAL_WORLD_SIZE": str(world)} if alone else {}),
        **{name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE") if name in env},
        "WORLD_SIZE": str(world),
        "RANK": str(number(env, "SLURM_PROCID", 0, world - 1)),
        "LOCAL_RANK": str(number(env, "SLURM_LOCALID", 0, world - 1)) if "SLURM_LOCALID" in env else "0",
    }


def _tasks(env: Mapping[str, str]) -> str | None:
    """The variable with the number of tasks beside this one; a step may have fewer than its job."""
    return next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in env), None)


def _first_machine(env: Mapping[str, str]) -> str:
    """The machine of task 0: `rack1-node3` for the list rack1-node[3-5,9],rack2-node1. SLURM_LAUNCH_NODE_IPADDR is the
    machine where srun was typed, perhaps a login machine."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if first := re.match(r"(?:[^,\[]|\[[^\]]*\])+", env.get(name, "")):
            return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first[0])
    return env.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")


def left_idle() -> str | None:
    """What to say if Slurm gave the job more than this command uses, because srun did not start it."""
    env = os.environ
    if "SLURM_JOB_ID" not in env or env.get("SLURM_STEP_ID", min(SHELLS)) not in SHELLS:
        return None
    counts = {"tasks": env.get("SLURM_NTASKS", "1"), "nodes": env.get("SLURM_NNODES", "1")}
    several = " on ".join(f"{count} {what}" for what, count in counts.items() if count.isdigit() and int(count) > 1)
    if not several:
        return None
    return f"launch: Slurm gave this job {several}, but srun did not start this command: it uses this machine alone"
