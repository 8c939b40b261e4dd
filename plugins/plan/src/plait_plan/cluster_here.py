"""The cluster that the machine at hand is one of."""

from plait import Cluster, PlaitError
from plait.host import device_name


def cluster_here(device_type: str) -> Cluster:
    """The shipped cluster for this machine's devices. Raises PlaitError if there is none."""
    name = device_name(device_type)
    found = Cluster.with_device(device_type, name)
    if found is None:
        raise PlaitError(
            f"no cluster is given, and none of {', '.join(Cluster.shipped())} is for {name or device_type}: set "
            "cluster=NAME, or write a file conf/cluster/NAME.yaml for it"
        ).at("cluster", fits=Cluster.shipped())
    return found
