"""A run as strategies see it."""

import re
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
    """What a strategy can find out about its run; every run has its own instance.

    config:         all typed nodes: `run.config.precision.param`, `run.config.train.seq_len`, ...
    world_size:     the number of ranks.
    device_type:    "cpu", or the type of torch's accelerator, such as "cuda".
    spec:           what the model says about itself.
    parameters:     the number of the model's parameters.
    strategies:     name -> instance of every selected strategy.
    shapes:         FQN -> shape of every parameter; a tied one under its first name.
    blocks:         FQN of every block of the model, in order.
    added:          FQNs of the parameters that strategies added to the model in `extend`.
    resumed_batch:  the global batch of the checkpoint that `plait train` goes on with; the run's own, if
                    `train.global_batch_size` is null. None without such a checkpoint.
    folder:         the run's folder, where a strategy may write a file; None outside `plait train`.
    storage_device: where parameters stay between steps; a strategy that offloads sets it to "cpu" in `parallelize`.
    device_name:    of the GPU, such as "NVIDIA H100 80GB HBM3"; "" without one.
    files, said, reports: from `leave`, `say` and `report`.
    logged, ending: from `log` and `stop`.
    """

    config: Config
    world_size: int
    device_type: str
    spec: "ModelSpec"
    parameters: int
    strategies: dict[str, Any] = attrs.field(factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    blocks: tuple[str, ...] = ()
    added: frozenset[str] = frozenset()
    resumed_batch: int | None = None
    folder: Path | None = None
    storage_device: str | None = None
    device_name: str = ""
    files: dict[str, str] = attrs.field(factory=dict)
    said: list[tuple[str, str]] = attrs.field(factory=list)
    reports: dict[str, Any] = attrs.field(factory=dict)
    logged: dict[str, Any] = attrs.field(factory=dict)
    ending: str | None = None
    _create: Callable[[str, Mapping[str, Any]], Any] | None = None  # from the registry

    @property
    def cluster(self) -> "Cluster":
        """The machines of the run: the config's cluster, else the shipped one for the devices here; a GPU without one
        counts as an H100. The same on all ranks."""
        from plait.contract.cluster import Cluster

        here = Cluster.with_device(self.device_type, self.device_name)
        return Cluster.of(self.config.cluster) or here or Cluster.shipped()["h100"]

    def use(self, name: str, **options: Any) -> None:
        """Select the installed strategy `name` with these options. Only inside `configure`.

        Raises PlaitError if no such strategy is installed, or if it is already selected.
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
        self.config = self.config.with_value(key, value)

    def leave(self, name: str, text: str) -> None:
        """Write a file with this name and content into the run's folder at its start. Only inside `configure`."""
        self.files[name] = text

    def say(self, line: str, details: str = "") -> None:
        """Tell the user: `plait train` prints the line, `plait plan` the details, if there are any. Only inside
        `configure`."""
        self.said.append((line, details))

    def log(self, name: str, value: Any) -> None:
        """Put a value into the row of this step in metrics.jsonl, which every sink gets. An observer does so up to
        `after`, or in `validated`: what it logs later stands in a later row.

        name: `<who>/<what>`, such as "norms/layers.0"; the last value of a name in a step counts.
        value: a number, or a tensor of one element, which is copied now, and read one step later so that no step waits
        for a GPU.

        The values of rank 0 are written: a value that ranks must add up, they add up before. Raises PlaitError for
        another name, or for what is no number.
        """
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", name):
            raise PlaitError(
                f"a value of a step is logged as '<who>/<what>', such as 'norms/layers.0', not as {name!r}"
            )
        if hasattr(value, "placements"):
            raise PlaitError(f"{name!r} is logged as a DTensor, of which a rank may have a part: log its full_tensor()")
        if hasattr(value, "detach") and value.numel() == 1:
            self.logged[name] = value.detach().reshape(()).clone()
        elif isinstance(value, int | float):
            self.logged[name] = value
        else:
            raise PlaitError(f"{name!r} is logged as {value!r}, which is no number and no tensor of one element")

    def take_logged(self) -> dict[str, Any]:
        """What was logged since it was last taken, by name. The trainer takes it after each step."""
        taken, self.logged = self.logged, {}
        return taken

    def stop(self, reason: str) -> None:
        """End the run as finished, with the next step: by then all ranks know, whichever of them asked. The state is
        saved and the weights are exported as at the last step. reason: said to the user, and kept in outcome.json."""
        self.ending = self.ending or reason

    def report(self, name: str, values: Any) -> None:
        """Add plain values to what `plait plan --json` prints, under this name. Only inside `configure`."""
        self.reports[name] = values
