"""A real Ray cluster of several nodes on this machine, in a process of its own: `python local_cluster.py NODES`, each
with one CPU. Prints its address. Reads lines: `lose` kills the newest node, `add` starts one; the end ends it."""

import itertools
import os
import shutil
import sys
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray._private.node import Node
from ray.cluster_utils import Cluster

QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 2}

options = {"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK}
cluster = Cluster(initialize_head=True, head_node_args=options)
addresses = itertools.count(2)


def add() -> Node:
    return cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{next(addresses)}")


nodes = [add() for _ in range(int(sys.argv[1]) - 1)]
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "lose\n":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    elif line == "add\n":
        nodes.append(add())
    print(line, end="", flush=True)
head: Any = cluster.head_node
session = head.get_session_dir_path()
cluster.shutdown()
shutil.rmtree(session, ignore_errors=True)
