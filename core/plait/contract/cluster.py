"""Descriptions of machines: one table, `conf/cluster/`, for everything that needs figures of a device."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import ge, gt

from plait.contract.errors import PlaitError
from plait.contract.schema import typed

PART = r"\bMIG\b|\bLaptop\b"  # in the name of a part of a chip, or of a smaller chip


@attrs.define
class Link:
    """bandwidth: bytes per second that one device sends. latency: seconds per hop of a collective."""

    bandwidth: float = attrs.field(validator=gt(0))
    latency: float = attrs.field(validator=ge(0))


def _band(_: Any, attribute: attrs.Attribute, value: list[float]) -> None:
    if len(value) != 2 or not 0 < value[0] <= value[1] <= 1:
        raise ValueError(f"'{attribute.name}' must be two numbers from 0 to 1, the lower one first: {value}")


def _of_torch(_: Any, attribute: attrs.Attribute, value: str) -> None:
    if value in ("cuda", "cpu"):  # before torch is imported
        return
    import torch

    try:
        torch.device(value)
    except RuntimeError:
        raise ValueError(
            f"'{attribute.name}' must be a type of device that this torch knows, such as cuda, cpu, xpu or mps: {value}"
        ) from None


@attrs.define
class Achieved:
    """[low, high] share of a peak that real kernels reach."""

    products: list[float] = attrs.field(validator=_band)
    memory: list[float] = attrs.field(validator=_band)
    links: list[float] = attrs.field(validator=_band)


@attrs.define
class Cluster:
    """One device, how many share a node, and their links: the keys of `cluster` in docs/configuration.md."""

    name: str
    memory: float = attrs.field(validator=gt(0))
    products: dict[str, float]
    bandwidth: float = attrs.field(validator=gt(0))
    node: int = attrs.field(validator=ge(1))
    inside: Link
    between: Link
    devices: list[str]
    achieved: Achieved
    device: str = attrs.field(default="cuda", validator=_of_torch)
    reserved: float = attrs.field(default=0.0, validator=ge(0))
    granularity: int = attrs.field(default=1, validator=ge(1))
    launch: float = attrs.field(default=0.0, validator=ge(0))

    def has(self, device_name: str) -> bool:
        """Whether `device_name` is one of its devices, and not a part of one."""
        whole = not re.search(PART, device_name)
        return whole and any(re.search(rf"(?<!\w)(?:{pattern})(?!\w)", device_name) for pattern in self.devices)

    def rounded(self, size: int) -> int:
        """The bytes that the allocator uses for `size` bytes."""
        return -(-size // self.granularity) * self.granularity

    def rate(self, dtype: str) -> float:
        """Operations per second in matrix products of this dtype. Raises PlaitError if the table lacks it."""
        if dtype not in self.products:
            raise PlaitError(
                f"cluster.products has no figure for {dtype}; it has {', '.join(self.products)}: add one to the file"
            ).at("cluster.products", dtype, fits=self.products)
        return self.products[dtype]

    def nodes(self, span: int) -> int:
        """How many nodes a group of ranks spans if its first and last rank are `span` ranks apart."""
        return -(-span // self.node)

    @classmethod
    def of(cls, node: Any) -> "Cluster | None":
        """The cluster in the resolved config's `cluster`; None if there is none. Raises PlaitError for a key that does
        not fit."""
        return typed(cls, node, "cluster") if node else None

    @staticmethod
    @functools.cache
    def shipped() -> "Mapping[str, Cluster]":
        """Name of an option -> cluster, for all that Plait ships."""
        from omegaconf import OmegaConf

        import plait.conf.cluster

        files = [path for folder in plait.conf.cluster.__path__ for path in sorted(Path(folder).glob("*.yaml"))]
        return {path.stem: typed(Cluster, OmegaConf.to_container(OmegaConf.load(path)), path.stem) for path in files}

    @classmethod
    def with_device(cls, device_type: str, device_name: str) -> "Cluster | None":
        """The shipped cluster of this device. device_name: from `torch.cuda.get_device_name`; ignored on a CPU."""
        for one in cls.shipped().values():
            if one.device == device_type and (device_type == "cpu" or one.has(device_name)):
                return one
        return None
