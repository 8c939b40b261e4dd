"""The types of a run's configuration, with the defaults of `conf/train.yaml`, which has their reasons."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.validators import deep_iterable, ge, gt, in_, le, optional

from plait.contract.errors import PlaitError
from plait.contract.model_spec import matches
from plait.contract.names import check_inside, check_name
from plait.contract.schema import typed

MOST_EPOCHS = 1_000_000  # passes over the data; far more than any run takes
YEAR = 366 * 24 * 60 * 60  # seconds; the system's clocks overflow far above this


def _one_of(*values: Any) -> Any:
    return attrs.field(default=values[0], validator=in_(values))


def _filled(_: Any, attribute: attrs.Attribute, value: str | None) -> None:
    if value == "":
        raise ValueError(f"'{attribute.name}' must not be empty")


def _a_name(_: Any, attribute: attrs.Attribute, value: Any) -> None:
    if value is not None:
        check_name(str(value), f"'{attribute.name}'")


def _a_type_of_device(_: Any, attribute: attrs.Attribute, value: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
        fits = "auto, cpu or a type of torch's, such as cuda or xpu; which one a rank has, its number says"
        raise ValueError(f"'{attribute.name}' must be {fits}; got {value!r}")


def _a_place(_: Any, attribute: attrs.Attribute, value: str) -> None:
    if "://" not in value:
        check_inside(value, f"'{attribute.name}'")


def _different(_: Any, attribute: attrs.Attribute, value: list[int]) -> None:
    if len(set(value)) < len(value):
        raise ValueError(f"'{attribute.name}' has a duplicate: {value}")


def _machines(_: Any, attribute: attrs.Attribute, value: int | str) -> None:
    """A count, or a range such as "1:4"."""
    counts = [str(value)] if isinstance(value, int) else value.split(":")
    if isinstance(value, str) != (len(counts) == 2) or not all(re.fullmatch("[0-9]{1,6}", count) for count in counts):
        raise ValueError(f"'{attribute.name}' must be a whole number, or MIN:MAX such as 1:4: {value}")
    if int(counts[0]) < 1:
        raise ValueError(f"'{attribute.name}' must be >= 1: {value}")
    if len(counts) == 2 and int(counts[0]) >= int(counts[1]):
        raise ValueError(f"'{attribute.name}' must be MIN:MAX with MIN < MAX: {value}")


def _one(_: Any, attribute: attrs.Attribute, value: dict[str, Any]) -> None:
    if len(value) > 1:
        raise ValueError(f"'{attribute.name}' names {' and '.join(value)}; a run has one")


@attrs.frozen
class Named:
    name: str | int | None = attrs.field(default=None, validator=_a_name)


@attrs.frozen
class Train:
    steps: int = attrs.field(default=140, validator=ge(1))
    epochs: float | None = attrs.field(default=None, validator=optional([gt(0), le(MOST_EPOCHS)]))
    seq_len: int = attrs.field(default=256, validator=ge(1))
    local_batch_size: int = attrs.field(default=8, validator=ge(1))
    global_batch_size: int | None = attrs.field(default=None, validator=optional(ge(1)))
    ramp: list[dict[str, int]] | None = None
    data_parts: int | None = attrs.field(default=None, validator=optional(ge(1)))
    seed: int = attrs.field(default=0, validator=ge(0))
    deterministic: bool = False
    max_norm: float = attrs.field(default=1.0, validator=gt(0))
    skip: float | None = attrs.field(default=None, validator=optional(gt(1)))
    gc_interval: int = attrs.field(default=50, validator=ge(0))


@attrs.frozen
class Precision:
    """The node `precision` of a config: the dtypes of storage, computation and reduction."""

    storage: str = _one_of("float32", "float64", "bfloat16")
    param: str = _one_of("float32", "float64", "bfloat16")
    reduce: str = _one_of("float32", "float64", "bfloat16")
    optimizer: str | None = attrs.field(default=None, validator=optional(in_(("bfloat16", "8bit"))))
    rounding: str = _one_of("nearest", "stochastic")


REMAT = ("none", "full", "selective")  # the modes of a single block


def _modes(_: Any, attribute: attrs.Attribute, value: dict[str, str]) -> None:
    for pattern, mode in value.items():
        if mode not in REMAT:
            raise ValueError(f"'{attribute.name}' gives {pattern} the mode {mode!r}; available: {', '.join(REMAT)}")


@attrs.frozen
class Remat:
    """The node `remat` of a config: what backward computes again."""

    mode: str = _one_of("none", "full", "selective", "budget")
    budget: float = attrs.field(default=0.5, validator=[gt(0), le(1)])
    blocks: dict[str, str] | None = attrs.field(default=None, validator=optional(_modes))

    def mode_of(self, block: str) -> str:
        """The mode of the block with the FQN `block`: that of the first matching pattern in `blocks`, else `mode`."""
        return next((mode for pattern, mode in (self.blocks or {}).items() if matches(pattern, block)), self.mode)


@attrs.frozen
class Compile:
    """The node `compile` of a config."""

    enabled: bool = False
    backend: str = attrs.field(default="inductor", validator=_filled)
    mode: str = _one_of("default", "max-autotune-no-cudagraphs")
    fullgraph: bool = True


@attrs.frozen
class Loss:
    """The node `loss` of a config."""

    chunks: int = attrs.field(default=1, validator=ge(1))
    function: dict[str, Any] = attrs.field(factory=dict, validator=_one)


@attrs.frozen
class Schedule:
    """The node `schedule` of a config: the learning rate as a part of `optimizer.lr`."""

    warmup_steps: int = attrs.field(default=20, validator=ge(0))
    warmup_ratio: float | None = attrs.field(default=None, validator=optional([ge(0), le(1)]))
    decay: str = _one_of("linear", "cosine", "sqrt")
    decay_steps: int | None = attrs.field(default=None, validator=optional(ge(0)))
    min_lr_ratio: float = attrs.field(default=0.1, validator=[ge(0), le(1)])
    shape: dict[str, Any] = attrs.field(factory=dict, validator=_one)

    def warmup(self, steps: int) -> int:
        """How many of the `steps` of a run are warm-up."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)


@attrs.frozen
class Validation:
    interval: int = attrs.field(default=40, validator=ge(0))
    batches: int = attrs.field(default=4, validator=ge(1))
    patience: int | None = attrs.field(default=None, validator=optional(ge(1)))


@attrs.frozen
class Checkpoint:
    enabled: bool = True
    interval: int = attrs.field(default=40, validator=ge(0))
    every_seconds: float | None = attrs.field(default=None, validator=optional([gt(0), le(YEAR)]))
    memory_steps: int | None = attrs.field(default=None, validator=optional(ge(1)))
    dir: str = attrs.field(default="checkpoints", validator=_a_place)
    load: str = attrs.field(default="latest", validator=_filled)
    init_from: str | None = attrs.field(default=None, validator=_filled)
    keep: int = attrs.field(default=2, validator=ge(1))
    keep_best: bool = False
    mode: str = _one_of("async", "sync")
    export: bool = True


@attrs.frozen
class Launch:
    mode: str = attrs.field(default="auto", validator=_filled)  # one of the words of this kind of plugin, or a name
    nproc_per_node: int | Literal["auto"] = "auto"
    nnodes: int | str = attrs.field(default=1, validator=_machines)
    rdzv_endpoint: str | None = None
    rendezvous_seconds: float = attrs.field(default=600.0, validator=[gt(0), le(YEAR)])
    run_id: str | int | None = attrs.field(default=None, validator=_a_name)
    max_restarts: int = attrs.field(default=3, validator=ge(0))
    grace_seconds: float = attrs.field(default=30.0, validator=[gt(0), le(YEAR)])
    timeout_seconds: float = attrs.field(default=600.0, validator=[gt(0), le(YEAR)])
    device: str = attrs.field(default="auto", validator=_a_type_of_device)

    @property
    def machines(self) -> range:
        """How many machines may train: one number, or MIN to MAX."""
        counts = [int(count) for count in str(self.nnodes).split(":")]
        return range(counts[0], counts[-1] + 1)

    @property
    def most(self) -> int:
        """Of the machines that train."""
        return self.machines[-1]

    @property
    def elastic(self) -> bool:
        """Whether the number of machines may change."""
        return len(self.machines) > 1


@attrs.frozen
class Metrics:
    log_every: int = attrs.field(default=10, validator=ge(1))
    tensorboard: bool | None = None
    wandb: bool = False


@attrs.frozen
class Profile:
    enabled: bool = False
    start: int = attrs.field(default=10, validator=ge(1))
    steps: int = attrs.field(default=3, validator=ge(1))
    ranks: list[int] = attrs.field(factory=lambda: [0], validator=[deep_iterable(ge(0)), _different])
    memory: bool = False


@attrs.frozen
class Sweep:
    prune: bool = False


@attrs.frozen
class Config:
    """One run, with a node for each part of docs/configuration.md: `config.train.steps`.

    `model`, `data` and `optimizer` are dicts with a `_target_`; `strategy`, `observer` and `sink` map names to options,
    `schedule.shape` and `loss.function` one name at most. `cluster` is empty, or the fields of a `Cluster`. Nothing of
    it changes: `with_value` returns another one.
    """

    run: Named = attrs.field(factory=Named)
    strategy: dict[str, Any] = attrs.field(factory=dict)
    observer: dict[str, Any] = attrs.field(factory=dict)
    sink: dict[str, Any] = attrs.field(factory=dict)
    model: dict[str, Any] = attrs.field(factory=dict)
    data: dict[str, Any] = attrs.field(factory=dict)
    optimizer: dict[str, Any] = attrs.field(factory=dict)
    train: Train = attrs.field(factory=Train)
    precision: Precision = attrs.field(factory=Precision)
    remat: Remat = attrs.field(factory=Remat)
    compile: Compile = attrs.field(factory=Compile)
    loss: Loss = attrs.field(factory=Loss)
    schedule: Schedule = attrs.field(factory=Schedule)
    validation: Validation = attrs.field(factory=Validation)
    checkpoint: Checkpoint = attrs.field(factory=Checkpoint)
    launch: Launch = attrs.field(factory=Launch)
    metrics: Metrics = attrs.field(factory=Metrics)
    profile: Profile = attrs.field(factory=Profile)
    sweep: Sweep = attrs.field(factory=Sweep)
    cluster: dict[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], whole: bool = False) -> "Config":
        """The config with these resolved plain values. whole: all keys must be there.

        Raises PlaitError, naming the key.
        """
        return typed(cls, values, "", whole)

    def plain(self) -> dict[str, Any]:
        """A copy in plain values, as config.yaml and a checkpoint's manifest hold it."""
        return attrs.asdict(self)

    def with_value(self, key: str, value: Any) -> "Config":
        """A config that differs in one value: `config.with_value("train.local_batch_size", 4)`. `key` is that of an
        option, or of a node without types, such as `strategy` or `data.tokenizer`.

        Raises PlaitError for a key that a run does not have, or a value that does not fit it.
        """
        name, _, field = key.partition(".")
        part: Any = getattr(self, name, None)
        if isinstance(part, dict):
            nodes: dict[str, Any] = {name: {**part, field: value} if field else dict(value)}
            return attrs.evolve(self, **nodes)
        if not attrs.has(type(part)) or not hasattr(part, field):
            raise PlaitError(f"there is no key {key} in a run's configuration").at(key)
        parts: dict[str, Any] = {name: typed(type(part), {**attrs.asdict(part, recurse=False), field: value}, name)}
        return attrs.evolve(self, **parts)


def accumulation(config: Config, data_ranks: int) -> int:
    """How many local batches make a rank's part of a global batch. Raises PlaitError if they do not fit."""
    local, total = config.train.local_batch_size, config.train.global_batch_size
    if total is None:
        return 1
    if total % (local * data_ranks):
        fits = [n * local * data_ranks for n in (total // (local * data_ranks), total // (local * data_ranks) + 1) if n]
        raise PlaitError(
            f"train.global_batch_size={total} does not divide into batches of train.local_batch_size={local} "
            f"on {data_ranks} data ranks; {' or '.join(map(str, fits))} would"
        ).at("train.global_batch_size", total, fits=fits)
    return total // (local * data_ranks)
