"""What Open MPI says of a rank, and what Kubernetes, SkyPilot, dstack and AWS Batch say of a machine. Imports nothing
heavy."""

import socket
from collections.abc import Mapping

import attrs

from plait import PlaitError

PORT = 29500  # free on most machines; `launch.rdzv_endpoint` or MASTER_PORT chooses another

Env = Mapping[str, str]


def endpoint(host: str, port: str | int = PORT) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@attrs.frozen
class Scheduler:
    """Starts one process per machine, and says so in four variables. host: the first word is the address of machine 0.
    ranks: how many GPUs each machine has for them."""

    count: str
    index: str
    host: str
    ranks: str

    def detect(self, env: Env) -> bool:
        return {self.count, self.index} <= env.keys()

    def machines(self, env: Env) -> dict[str, str]:
        hosts = env.get(self.host, "").split()
        return {
            "nnodes": env[self.count],
            "index": env[self.index],
            **({"rdzv_endpoint": endpoint(hosts[0])} if hosts else {}),
            **({"nproc_per_node": env[self.ranks]} if env.get(self.ranks, "0") != "0" else {}),
        }


skypilot = Scheduler("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE")
dstack = Scheduler("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "DSTACK_GPUS_PER_NODE")


class AwsBatch:
    """A multi-node parallel job. Only the other nodes are told the address of the main one."""

    def detect(self, env: Env) -> bool:
        return "AWS_BATCH_JOB_NUM_NODES" in env

    def machines(self, env: Env) -> dict[str, str]:
        index = env["AWS_BATCH_JOB_NODE_INDEX"]
        is_main = index == env.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")
        host = "localhost" if is_main else env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
        return {"nnodes": env["AWS_BATCH_JOB_NUM_NODES"], "index": index, "rdzv_endpoint": endpoint(host)}


class Kubeflow:
    """A PyTorchJob or a TrainJob of Kubeflow. PET_* are arguments of torchrun, which started nothing here. RANK is the
    number of the pod, and WORLD_SIZE may count pods or ranks."""

    def detect(self, env: Env) -> bool:
        return "PET_NNODES" in env and "LOCAL_RANK" not in env

    def machines(self, env: Env) -> dict[str, str]:
        def first(*names: str) -> str:
            return next((env[name] for name in names if env.get(name)), "")

        host, port = first("PET_MASTER_ADDR", "MASTER_ADDR"), first("PET_MASTER_PORT", "MASTER_PORT")
        where = first("PET_RDZV_ENDPOINT") or (endpoint(host, port or PORT) if host else "")
        index, ranks = first("PET_NODE_RANK", "RANK"), first("PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE")
        return {
            "nnodes": env["PET_NNODES"],
            **({"index": index} if index else {}),
            **({"rdzv_endpoint": where} if where else {}),
            **({"nproc_per_node": ranks} if ranks.isdecimal() else {}),  # it may also be "auto", "gpu" or "cpu"
        }


class Kubernetes:
    """An Indexed Job, such as those of a JobSet. Its pods are NAME-0, NAME-1, ... in the domain of a headless service;
    how many there are no variable says."""

    def detect(self, env: Env) -> bool:
        return "JOB_COMPLETION_INDEX" in env and not kubeflow.detect(env)

    def machines(self, env: Env) -> dict[str, str]:
        index = env["JOB_COMPLETION_INDEX"]
        return {"index": index, "rdzv_endpoint": endpoint(env.get("MASTER_ADDR") or self.first_pod(index))}

    def first_pod(self, index: str) -> str:
        name, _, domain = socket.getfqdn().partition(".")
        if not name.endswith(f"-{index}") or not domain:
            raise PlaitError(
                f"this pod is named {socket.getfqdn()}, not NAME-{index} in the domain of a headless service, so the "
                "others are not known: set subdomain in the pod's template to the name of such a service, or "
                "MASTER_ADDR to the name of pod 0"
            ).at("MASTER_ADDR")
        return f"{name.removesuffix(index)}0.{domain}"


class OpenMpi:
    """Ranks that mpirun of Open MPI started."""

    def detect(self, env: Env) -> bool:
        return "OMPI_COMM_WORLD_RANK" in env

    def variables(self, env: Env) -> dict[str, str]:
        names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
        rank = {name: env[f"OMPI_COMM_WORLD_{end}"] for name, end in names.items()}
        alone = rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"]
        if not alone and not env.get("MASTER_ADDR"):
            raise PlaitError(
                "mpirun started ranks on several machines, and no variable of Open MPI says where rank 0 is: add "
                "-x MASTER_ADDR=HOST, the first machine, to mpirun's options"
            ).at("MASTER_ADDR")
        return {
            **rank,
            "MASTER_ADDR": env.get("MASTER_ADDR") or "localhost",
            "MASTER_PORT": env.get("MASTER_PORT") or str(PORT),
        }


aws_batch, kubeflow, kubernetes, openmpi = AwsBatch(), Kubeflow(), Kubernetes(), OpenMpi()
