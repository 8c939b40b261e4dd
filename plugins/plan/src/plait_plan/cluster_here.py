"""The cluster that the machine at hand is one of."""

import torch

from plait import Cluster, PlaitError


def cluster_here(device_type: str) -> Cluster:
    """The shipped cluster for this machine's devices. Raises PlaitError if there is none."""
    name = torch.cuda.get_device_name() if device_type == "cuda" and torch.cuda.is_available() else ""
    found = Cluster.with_device(device_type, name)
    if found is None:
        raise PlaitError(
            f"no cluster is given, and none of {', '.join(Cluster.shipped())} is for {name or device_type}: set "
            "cluster=NAME, or write a file conf/cluster/NAME.yaml for it"
        ).at("cluster", fits=Cluster.shipped())
    return found
