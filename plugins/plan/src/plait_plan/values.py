"""A plan as values: nothing here computes, and everything becomes JSON. Sizes are bytes, times seconds."""

from typing import Any

import attrs

FULL = 3  # the exit code if a run does not fit

KINDS = (
    "parameters", "gradients", "optimizer", "gathered", "collectives", "activations", "logits", "temporary", "other",
)  # fmt: skip


@attrs.frozen
class Traffic:
    """All collectives of one kind over one mesh axis in one step of one rank.

    axis:  name of the mesh axis; "data" for several axes that sum gradients together, "world" for all ranks.
    kind:  all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv.
    count: number of calls. bytes: what they move in total: of each its input or its result, whichever is larger.
    ranks: how many take part. nodes: how many nodes they span; None without a cluster.
    """

    axis: str
    kind: str
    count: int
    bytes: int
    ranks: int
    nodes: int | None = None


@attrs.frozen
class Peak:
    """The moment of a step at which most memory is in use.

    phase: forward, loss, backward, recompute, clip, optimizer or after. module: FQN of what runs; "" is the model.
    operator: the operator that allocates last. held: bytes by kind (a key of KINDS), whose sum is the peak.
    """

    phase: str
    module: str
    operator: str
    held: dict[str, int]


@attrs.frozen
class Memory:
    """Memory of one rank in a step after the first, as torch's allocator counts it.

    Each kind is its maximum at any moment, so kinds do not add up to the peak; `at.held` does.
    parameters:  what the rank stores, with the model's buffers. gradients: as the optimizer gets them.
    gathered:    copies of parameters: gathered from other ranks, or cast.
    collectives: other tensors that collectives read or write.
    activations: what forward keeps for backward, and what recomputation creates again.
    logits:      the model's output and what the loss creates from it.
    temporary:   the rest of forward, backward and optimizer. other: what existed before and is none of these.
    reserved:    what torch's CUDA allocator takes from a GPU for the peak: (with expandable segments, without).
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    collectives: int
    temporary: int
    other: int
    peak: int
    reserved: tuple[int, int]
    at: Peak


@attrs.frozen
class Work:
    """All calls of one operator in one step of one rank. bytes: what it reads and writes."""

    operator: str
    count: int
    flops: int
    bytes: int


@attrs.frozen
class Time:
    """A step's time as [low, high]; None without a cluster.

    compute, exchange: seconds of operators and of collectives, each alone. bound: what takes most of a step:
    "matrix products", "memory bandwidth" or "collectives over <axis>".
    """

    step: tuple[float, float]
    tokens_per_second: tuple[float, float]
    mfu: tuple[float, float] | None
    compute: tuple[float, float]
    exchange: tuple[float, float]
    bound: str


@attrs.frozen
class StageCost:
    """A rank that has some of the model's stages, and what a step costs it.

    rank: in the world. stages: their numbers; blocks: how many each has. parameters, gradients, optimizer, peak: as in
    `Memory`. live: the most micro-batches at once whose activations it keeps, each stage counted. sends, sent: streams
    and gradients that it sends, and their bytes. busy: seconds of its micro-batches, without waiting: [low, high].
    """

    rank: int
    stages: list[int]
    blocks: list[int]
    parameters: int
    gradients: int
    optimizer: int
    peak: int
    live: int
    sends: int
    sent: int
    busy: tuple[float, float] | None


@attrs.frozen
class Stages:
    """How the ranks that divide the layers share a step. axis: which they are on. micro: micro-batches of a step.

    bubble: the share of the time of the micro-batches in which ranks wait, over all ranks, at the [low, high] end of
    the step's time; None without a cluster.
    """

    axis: str
    schedule: str
    micro: int
    bubble: tuple[float, float] | None
    ranks: list[StageCost]


@attrs.frozen
class PlannedAxis:
    """One axis of the mesh. nodes: how many nodes its ranks span; None without a cluster."""

    view: str
    name: str
    degree: int
    role: str
    strategy: str
    nodes: int | None = None


@attrs.frozen
class Plan:
    """What one step of a run will cost one rank.

    stages: of all ranks, if the layers are divided; else None.
    fits: whether the peak is below the free memory of the cluster's device; None without a cluster.
    free: bytes left at the peak; negative if it does not fit. node: ranks per node of the cluster.
    copies: bytes of main memory per machine, at most, that `checkpoint.memory_steps` takes; None without it.
    traced: (traced blocks, blocks). reports: by name, of strategies. assumed: key -> value of what decides most.
    """

    model: str
    strategies: list[str]
    parameters: int
    world: int
    rank: int
    tokens: int
    axes: list[PlannedAxis]
    memory: Memory
    collectives: list[Traffic]
    work: list[Work]
    flops: int
    time: Time | None
    fits: bool | None
    free: int | None
    capacity: int | None
    cluster: str | None
    node: int | None
    traced: tuple[int, int]
    assumed: dict[str, Any]
    stages: Stages | None = None
    copies: int | None = None
    notes: list[str] = attrs.field(factory=list)
    reports: dict[str, Any] = attrs.field(factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, equal for equal plans; strategies' reports under their own names."""
        found = attrs.asdict(self)
        return {**found.pop("reports"), **found}
