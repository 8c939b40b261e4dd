"""`plait ray`: one run on the machines of a Ray cluster."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Parser

help = "train on the machines of a Ray cluster"


def arguments(parser: "Parser") -> None:
    parser.description = """\
Trains, for the overrides of `plait train`, on launch.nnodes nodes of a Ray cluster, with launch.nproc_per_node GPUs on
each, or CPUs if the cluster has no GPU or launch.device=cpu. Run it on a node of the cluster, in a folder that all
nodes share."""
    parser.take_overrides()
    parser.add_argument("--address", metavar="HOST:PORT", help="of the cluster (default: RAY_ADDRESS, or this node's)")
    parser.add_argument("--pack", action="store_true", help="let several of the run's machines share a node")
    parser.add_argument(
        "--wait", action="store_true", help="wait for nodes that are not there yet, such as those of an autoscaler"
    )


def run(args: "Namespace") -> int:
    import sys
    from functools import partial

    from plait.host import compose, overrides_of
    from plait_ray.cluster import connected
    from plait_ray.driver import Driver, check, wanted

    overrides = overrides_of(args)
    launch, say = compose(overrides).launch, partial(print, file=sys.stdout, flush=True)
    check(launch)
    with connected(args.address) as address:
        need = wanted(launch, address, args.pack, args.wait)
        return Driver(launch, need, overrides, args.pack, say).run()
