"""What a step of stages costs, put together of the pieces of the whole model: good enough to choose which to plan."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import attrs
from torch import nn

from plait import Cluster, Config, MeshLayout, ModelSpec, StageAction, StagePlan
from plait.host import assemble
from plait_plan.pricing.pieces import Pieces
from plait_plan.pricing.price import BlockCost, Price
from plait_plan.ranks import degrees, members
from plait_plan.stages.divided import divided, seconds_between, times
from plait_plan.stages.times import play_stages
from plait_plan.summary import memory_of
from plait_plan.tracing.recording import DEVICE

FORWARD = 1 / 3  # of the time of what stands after the blocks: a matrix product, and two in backward


@attrs.frozen
class StageTotal:
    """The cost of a step whose ranks have stages. seconds: its time. peaks: by rank along the axis that divides the
    layers, bytes. bubble: the share of the time in which ranks wait."""

    seconds: float
    peaks: list[float]
    bubble: float

    @property
    def peak(self) -> float:
        return max(self.peaks)


def planned_stages(config: Config, world: int, cluster: Cluster) -> StageTotal:
    """The cost of a step whose ranks have stages, from a trace of each stage; seconds are the mean of the best and the
    worst rates. config: with the strategies' final options."""
    config = config.with_value("compile.enabled", False)
    found = divided(config, assemble(config, world, device_type=DEVICE).extend(), 0, cluster)
    ends = [times(found, cluster, best) for best in (True, False)]
    seconds, bubble = (sum(each) / 2 for each in zip(*((e.step, e.played.bubble) for e in ends), strict=True))
    return StageTotal(seconds, [float(memory_of(step).peak) for step in found.steps], bubble)


def shares(pieces: Pieces, layout: MeshLayout, plan: StagePlan, model: nn.Module, spec: ModelSpec) -> list[float]:
    """Share (0 to 1) of each stage, in order: of the elements that a rank would hold of the whole model."""
    blocks, now = list(spec.blocks_of(model)), degrees(layout)
    ends = pairwise([0, *accumulate(plan.blocks)])
    stage_of = {fqn: number for number, (a, b) in enumerate(ends) for fqn in blocks[a:b]}
    before = tuple(f"{fqn}." for fqn in spec.before_of(model))
    found = [0] * len(plan.blocks)
    for fqn, tensor in pieces.tensors.items():
        outside = 0 if fqn.startswith(before) else len(found) - 1
        found[stage_of[tensor.block] if tensor.block else outside] += tensor.local(now)
    return [each / sum(found) for each in found]


def stage_total(
    price: Price,
    plan: StagePlan,
    kinds: Sequence[int],
    mode: str,
    share: list[float],
    layout: MeshLayout,
    cluster: Cluster,
) -> StageTotal:
    """An estimate of a step in which all blocks recompute in `mode`.

    price: of the whole model; if it has no blocks that recompute all, stages send each other nothing, and the step may
    take longer. kinds: of the blocks, in order. share: of each stage, see `shares`.
    """
    costs = [price.blocks[kind][mode] for kind in kinds]
    ends = list(pairwise([0, *accumulate(plan.blocks)]))
    stages = [_Stage(price, costs[a:b], first=a == 0, last=b == len(costs)) for a, b in ends]
    all_again = price.blocks[kinds[0]].get("full")  # such a block keeps what it got
    stream = all_again.kept if all_again else 0.0
    gradients = [sum(price.gradients[kind] for kind in kinds[a:b]) for a, b in ends]
    peaks, around = [], []
    for rank, actions in enumerate(plan.actions):
        own = plan.stages_of(rank)
        part = sum(share[n] for n in own)
        micro = 1 + max(action.micro for action in actions)
        ways = sum(n > 0 for n in own) + sum(n < len(stages) - 1 for n in own)
        passed = ((plan.buffers or 0) * ways + len(plan.keeps) * micro * len(own)) * stream
        always = price.static * part + price.base + sum(gradients[n] for n in own) + passed
        peaks.append(max(always + _most(actions, stages), (price.static + price.end) * part))
        around.append((price.step + (micro - 1) * price.adds) * part)
    seconds = [[stages[a.stage].seconds[a.kind] for a in actions] for actions in plan.actions]
    ranks = members(layout, [axis.name for axis in layout.dense if axis.splits == "layers"])
    sending = seconds_between(plan, ranks, cluster, stream, sum(cluster.achieved.links) / 2)
    played = play_stages(plan, seconds, sending)
    return StageTotal(played.seconds + max(around), peaks, played.bubble)


class _Stage:
    """The cost of one stage for one micro-batch. seconds: by kind of action. kept: bytes for backward. rise, fall:
    bytes at the peaks of forward and of backward, above what was kept before."""

    def __init__(self, price: Price, costs: list[BlockCost], first: bool, last: bool) -> None:
        before = price.micro - price.after if first else 0.0
        after = price.after if last else 0.0
        forward = sum(cost.forward_seconds for cost in costs) + costs[0].exposed[0] + before / 2 + after * FORWARD
        backward = sum(cost.seconds - cost.forward_seconds for cost in costs) + costs[0].exposed[1]
        backward += before / 2 + after * (1 - FORWARD)
        apart = (0.0, backward) if first else (backward / 2, backward / 2)  # the first stage computes everything later
        self.seconds: Mapping[str, float] = {
            "forward": forward, "backward": backward, "stream": apart[0], "weights": apart[1],
        }  # fmt: skip
        sums = list(accumulate((cost.kept for cost in costs), initial=0.0))
        self.kept = sums[-1]
        head = self.kept + price.head if last else 0.0
        self.rise = max(head, *(kept + cost.forward for kept, cost in zip(sums, costs, strict=False)))
        self.fall = max(head, *(kept + cost.backward for kept, cost in zip(sums[1:], costs, strict=True)))


def _most(actions: Sequence[StageAction], stages: list[_Stage]) -> float:
    """The most bytes of activations during these actions."""
    now = most = 0.0
    for action in actions:
        stage = stages[action.stage]
        if action.kind == "forward":
            most = max(most, now + stage.rise)
            now += stage.kept
            continue
        most = max(most, now - stage.kept + stage.fall)
        if action.kind != "stream":
            now -= stage.kept
    return most
