"""The Ray cluster: how it is reached, what it has, and what a machine of a run needs of it."""

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

import attrs
import ray

from plait import PlaitError
from plait.host import one_line

REACHED_SECONDS = 5.0


@attrs.frozen
class Need:
    """What one machine of a run needs. kind: GPU or CPU."""

    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.kind}{'s' * (self.count != 1)}"

    @property
    def bundle(self) -> dict[str, float]:
        return {self.kind: float(self.count)}


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[str]:
    """Inside, this process is a driver of the cluster, whose address is given, and its standard output is closed: Ray
    prints the logs of lost nodes there. Raises PlaitError if none answers."""
    asked = address or os.environ.get("RAY_ADDRESS") or "auto"
    key = "--address" if address else "RAY_ADDRESS"
    form = "HOST:PORT of the cluster's head node, such as node0:6379"
    if asked != "auto":
        parts = re.fullmatch(r"\[?([^\s/\[\]]+?)\]?:([0-9]{1,5})", asked)
        if parts is None:
            raise PlaitError(f"{key}={asked!r} is no {form}; run `plait ray` on a node of it").at(key, asked, fits=form)
        try:
            socket.create_connection((parts[1], int(parts[2])), REACHED_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise PlaitError(f"no Ray cluster answers at {key}={asked}: {one_line(error)}").at(
                key, asked, fits=form
            ) from error
    try:
        ray.init(address=asked, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:
        where = "here; start one with `ray start --head`, or set --address" if asked == "auto" else f"at {key}={asked}"
        raise PlaitError(f"no Ray cluster was found {where}; Ray says: {one_line(error)}").at(
            key, asked, fits=form
        ) from error
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


def nodes(kind: str) -> list[int]:
    """How many of the resource `kind` each node of the cluster has, in falling order."""
    alive: list[dict[str, Any]] = [each for each in ray.nodes() if each["Alive"]]
    return sorted((int(each["Resources"].get(kind, 0)) for each in alive), reverse=True)


def room(need: Need, pack: bool) -> int:
    """How many machines the cluster has room for, if nothing else runs on it."""
    return sum(count // need.count if pack else count >= need.count for count in nodes(need.kind))


def shown(kind: str) -> str:
    """The cluster in words."""
    counts = nodes(kind)
    free = int(ray.available_resources().get(kind, 0))
    return (
        f"the cluster has {len(counts)} node{'s' * (len(counts) != 1)} with {sum(counts)} {kind}s, {free} of them free"
    )
