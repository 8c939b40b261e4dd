"""The run as strategies see it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from plait.contract.config import Config
from plait.contract.errors import PlaitError

if TYPE_CHECKING:
    from plait.contract.cluster import Cluster
    from plait.contract.model_spec import ModelSpec


@attrs.define
class Run:
    """What a strategy may ask of the run it is in; made afresh for every run.

    config:         all typed nodes: `run.config.precision.param`, `run.config.train.seq_len`, ...
    world_size:     how many ranks there are.
    device_type:    "cpu" or "cuda".
    spec:           what the model says of itself.
    parameters:     how many parameters the model has.
    strategies:     name -> instance, of all that are selected.
    shapes:         FQN -> shape of every parameter, a tied one under its first name.
    blocks:         FQN of every block of the model, in order.
    folder:         where the run keeps its files, and a strategy may leave one; None outside `plait train`.
    changes:        dotted key -> value, of what strategies changed by `set`. files, said: by `leave` and `say`.
    storage_device: where parameters rest between steps; a strategy that offloads sets it to "cpu" in `parallelize`.
    """

    config: Config
    world_size: int
    device_type: str
    spec: "ModelSpec"
    parameters: int
    strategies: dict[str, Any] = attrs.field(factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    blocks: tuple[str, ...] = ()
    folder: Path | None = None
    storage_device: str | None = None
    changes: dict[str, Any] = attrs.field(factory=dict)
    files: dict[str, str] = attrs.field(factory=dict)
    said: list[tuple[str, str]] = attrs.field(factory=list)
    _create: Callable[[str, Mapping[str, Any]], Any] | None = None  # the registry's

    @property
    def cluster(self) -> "Cluster":
        """The machines that the run is for: those that the config names, else those whose devices are here; a GPU
        that no file in `conf/cluster/` is for counts as an H100. All ranks find the same."""
        from plait.contract.cluster import cluster_of, cluster_with, shipped

        name = ""
        if self.device_type == "cuda":
            import torch

            name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return cluster_of(self.config.cluster) or cluster_with(self.device_type, name) or shipped()["h100"]

    def use(self, name: str, **options: Any) -> None:
        """Select the installed strategy `name` with these options. Only inside `configure`.

        Raises PlaitError where no such strategy is installed, or it is selected already.
        """
        if name in self.strategies:
            raise PlaitError(f"strategy {name!r} is selected already; it cannot be configured a second time")
        if self._create is None:
            raise PlaitError(
                f"strategy {name!r} cannot be selected here: this run was made without installed strategies"
            )
        self.strategies[name] = self._create(name, options)

    def set(self, key: str, value: Any) -> None:
        """Change the run's configuration: `run.set("train.local_batch_size", 4)`. Only inside `configure`.

        Raises PlaitError for a key that a run does not have, or a value that does not fit it.
        """
        from plait.contract.schema import typed

        node, _, name = key.rpartition(".")
        part: Any = getattr(self.config, node, None)
        if not attrs.has(type(part)) or not hasattr(part, name):
            raise PlaitError(f"there is no key {key} in a run's configuration")
        now = typed(type(part), {**attrs.asdict(part, recurse=False), name: value}, node)
        setattr(part, name, getattr(now, name))
        self.changes[key] = value

    def leave(self, name: str, text: str) -> None:
        """Have a file of this name and content in the run's folder when it starts. Only inside `configure`."""
        self.files[name] = text

    def say(self, line: str, details: str = "") -> None:
        """Tell the user: `plait train` prints the line, `plait plan` the details, if there are any. Only inside
        `configure`."""
        self.said.append((line, details))
