"""Which blocks each stage has, and which stages each rank."""

from itertools import accumulate

from torch import nn

from plait import ModelSpec, stage
from plait_pipeline.options import SCHEDULES, PipelineOptions


def cut(options: PipelineOptions, model: nn.Module, rank: int, spec: ModelSpec, seq_len: int) -> list[nn.Module]:
    """The stages of `rank`, in the order in which data passes them."""
    ends = [0, *accumulate(blocks_of(options, model, spec, seq_len))]
    return [stage(model, spec, ends[number], ends[number + 1]) for number in stages_of(rank, options)]


def blocks_of(options: PipelineOptions, model: nn.Module, spec: ModelSpec, seq_len: int) -> list[int]:
    """The number of blocks of each stage."""
    return options.layers_per_stage or balanced(*costs(model, spec, seq_len), options.degree * options.per_rank)


def stages_of(rank: int, options: PipelineOptions) -> list[int]:
    """The numbers of the stages of `rank`: every `degree`-th; with zbv one on the way down the ranks, one back up."""
    if SCHEDULES[options.schedule].v:
        return [rank, 2 * options.degree - 1 - rank]
    return [rank + options.degree * turn for turn in range(options.per_rank)]


def costs(model: nn.Module, spec: ModelSpec, seq_len: int) -> tuple[list[float], float]:
    """(of each block, of what stands after the blocks): elements that a token is multiplied with.

    These are the elements of matrices, and in attention those of keys and values: what `spec.flops` adds for the length
    of a sequence, in equal parts for all blocks. Embeddings are looked up, which costs next to nothing. Of stacked
    experts as many count as a token visits, which is the router's `top_k`, or one.
    """
    attention = (spec.flops(seq_len) - spec.flops(0)) / 6 / len(spec.blocks_of(model)) if spec.flops else 0.0
    routers = spec.routers_of(model)

    def cost(fqn: str, module: nn.Module) -> float:
        visits = next((getattr(r, "top_k", 1) for name, r in routers.items() if name.startswith(f"{fqn}.")), 1)
        total = 0.0
        for name, param in module.named_parameters():
            axes = spec.axes_of(f"{fqn}.{name}")
            if len(axes) > 1:
                total += param.numel() * (min(visits / param.shape[0], 1) if axes[0] == "experts" else 1)
        return total

    blocks = [attention + cost(fqn, block) for fqn, block in spec.blocks_of(model).items()]
    return blocks, sum(cost(fqn, module) for fqn, module in spec.after_of(model).items())


def balanced(blocks: list[float], after: float, stages: int) -> list[int]:
    """The numbers of blocks of each stage with which the most expensive stage costs least; earlier stages, which keep
    the activations of more micro-batches, get fewer blocks if that changes nothing."""
    sums = [0.0, *accumulate(blocks)]
    count = len(blocks)
    # best[i]: (cost of the most expensive stage, numbers of blocks) of the stages so far with the blocks from i on
    best = {i: (sums[count] - sums[i] + after, [count - i]) for i in range(stages - 1, count)}
    for left in range(stages - 2, -1, -1):
        best = {
            i: min((max(sums[j] - sums[i], best[j][0]), [j - i, *best[j][1]]) for j in range(i + 1, count) if j in best)
            for i in range(left, count - (stages - 1 - left))
        }
    return best[0][1]
