"""How long a search takes, what it finds, and what it gains over plans that a person would make.

    python benchmarks/autoparallel.py speed        # the time and memory of the search for large models; for the time
                                                   # without kept traces, with PLAIT_CACHE at an empty folder
    python benchmarks/autoparallel.py gains        # over a grid of models, worlds, memory and batches; or of one model
    python benchmarks/autoparallel.py published    # beside the layouts of published runs

Times of steps are planned ones, by the cost model of `plait plan`.
"""

import functools
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

CASES = {
    "llama3 8b, 64 ranks": (64, ["model=llama3_8b", "train.seq_len=8192", "train.local_batch_size=1"], 10.0),
    "llama3 405b, 4096 ranks": (4096, ["model=llama3_405b", "train.seq_len=8192", "train.local_batch_size=1"], 60.0),
    "deepseek_v3 671b, 2048 ranks": (
        2048,
        ["model=deepseek_v3_671b", "train.seq_len=4096", "train.local_batch_size=1"],
        120.0,
    ),
}
COMMON = ["strategy=[autoparallel]", "cluster=h100", "precision.param=bfloat16", "validation.interval=0"]
OURS = "strategy.autoparallel.strategies=[fsdp2,tensor_parallel,expert_parallel]"
# Llama 3.1 as torchtitan's published runs have it: model, ranks, samples of a rank, and the axes that were used.
PUBLISHED = [
    ("llama3_8b", 8, 2, {"dp_shard": 8}),
    ("llama3_8b", 128, 2, {"dp_shard": 128}),
    ("llama3_70b", 256, 2, {"dp_shard": 32, "tp": 8}),
    ("llama3_405b", 512, 2, {"dp_shard": 64, "tp": 8}),
]


def found(overrides: list[str], world: int, common: Sequence[str] = COMMON, prune: bool = False) -> Any:
    """What a search finds: `plait_autoparallel.search.SearchResult`. prune: as a run searches, without the layouts that
    cannot win."""
    from plait import PlaitError
    from plait.host import check, compose
    from plait_autoparallel import decide, search
    from plait_plan.engine import plannable

    caught: list[Any] = []
    plain = decide.file.plan

    def noted(result: Any, *rest: Any) -> Any:
        caught.append(result)
        return plain(result, *rest)

    decide.file.plan = noted
    usual, search.search = search.search, functools.partial(search.search, prune=prune)
    try:
        check(plannable(compose([*common, *overrides, OURS]), []), world)
    except PlaitError as error:
        return error
    finally:
        decide.file.plan, search.search = plain, usual
    return caught[0]


def speed(only: str = "") -> None:
    """Measures each search in its own process."""
    for name in CASES:
        if only in name:
            subprocess.run([sys.executable, __file__, "one", name], check=True)


def one(name: str) -> None:
    world, overrides, limit = CASES[name]
    start = time.perf_counter()
    result = found(overrides, world, prune=True)
    taken = time.perf_counter() - start
    peak, others = (
        resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    from plait_autoparallel.words import described, recomputed
    from plait_autoparallel.words import time as said

    used = sum(os.times()[:4])  # on a machine that does other work too, the wall clock says little
    print(f"{name}: {taken:.1f} s (to reach: {limit:.0f}), {used:.1f} s of CPU, {peak:.2f} GiB here and "
          f"at most {others:.2f} GiB in each of {os.cpu_count()} further processes", flush=True)  # fmt: skip
    if isinstance(result, Exception):
        print(f"  {result}")
        return
    best = result.best
    print(f"  {described(best.candidate)}; {recomputed(best.mix.modes)}; {said(best.mix.total.seconds)}")
    print(f"  {result.traced} traced, {len(result.others) + 1} layouts fit, {len(result.short)} do not")


GRID = {  # model: numbers of ranks, GB of a rank, samples of a rank
    "llama3_1b": ((8,), (24, 40, 78), (1, 2, 4)),
    "llama3_8b": ((8, 64), (40, 60, 78), (1, 2, 4)),
    "llama3_70b": ((64, 256), (40, 60, 78), (1, 2, 4)),
}


def by_hand(one: Any) -> bool:
    """Whether a person would name these strategies: FSDP2 over all ranks or over each node, tensor parallelism within
    a node beside it, and options as they are by default."""
    axes = {a.name: a.degree for a in one.candidate.composition.layout.dense if a.degree > 1}
    options = one.candidate.composition.strategies
    world = one.candidate.composition.layout.world_size
    inside = axes.get("dp_shard", 1) * axes.get("tp", 1)
    return (
        options.get("fsdp2", {}).get("reshard_after_forward", "default") == "default"
        and inside in (8, world)
        and axes.get("tp", 1) in (1, 8)
        and "expert_parallel" not in options
    )


def fastest(plans: list[Any]) -> Any:
    return min(plans, key=lambda one: one.mix.total.seconds, default=None)


def usual_batch(plans: list[Any]) -> list[Any]:
    """As many samples at once as fit, of each layout and mode."""
    most: dict[Any, Any] = {}
    for one in plans:
        key = one.candidate.composition.text(), one.mix.modes
        if key not in most or one.candidate.rows > most[key].candidate.rows:
            most[key] = one
    return list(most.values())


def gains(only: str = "", ranks: str = "") -> None:
    """The plan against the best plan by hand, over the grid; what each further freedom gains, one after the other.

    Plans are compared as the search puts them together; the trace that checks the memory of each is left out.
    """
    from plait import planning

    planning.needs = lambda *_: 1.0
    rows: list[dict[str, float]] = []
    print("| model | ranks | memory | samples | by hand | batch | axes and options | mixed recomputation | the plan | "
          "gain |\n|" + "---|" * 10)  # fmt: skip
    for model, (worlds, sizes, batches) in GRID.items():
        for world, memory, samples in itertools.product(worlds, sizes, batches):
            if only not in ("", model) or ranks not in ("", str(world)):
                continue
            overrides = [f"model={model}", "train.seq_len=8192", f"train.local_batch_size={samples}",
                         f"strategy.autoparallel.memory={memory}e9"]  # fmt: skip
            result = found(overrides, world)
            case = f"| {model} | {world} | {memory} GB | {samples} |"
            if isinstance(result, Exception):
                if "no plan fits" not in str(result):
                    raise result
                print(f"{case} nothing fits | | | | | |", flush=True)
                continue
            plain = [one for one in result.hand if by_hand(one)]
            chain = [fastest(usual_batch(plain)), fastest(plain), fastest(result.hand), result.best]
            seconds = [one.mix.total.seconds if one else float("inf") for one in chain]
            assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(seconds)), seconds
            if chain[0] is None:
                print(f"{case} nothing fits | | | | {seconds[-1]:.3f} s | |", flush=True)
                continue
            parts = [before / after - 1 for before, after in itertools.pairwise(seconds)]
            names = ("batch", "axes and options", "mixed recomputation")
            rows.append({**dict(zip(names, parts, strict=True)), "gain": seconds[0] / seconds[-1] - 1})
            cells = " | ".join(f"{100 * part:.1f}%" for part in parts)
            print(f"{case} {seconds[0]:.3f} s | {cells} | {seconds[-1]:.3f} s | {100 * rows[-1]['gain']:.1f}% |",
                  flush=True)  # fmt: skip
    for name in rows[0]:
        each = [row[name] for row in rows]
        print(f"{len(rows)} cases, {name}: mean {100 * sum(each) / len(each):.2f}%, most {100 * max(each):.2f}%")


def published(only: str = "") -> None:
    """Llama 3.1 on as many H100 as published runs had: their axes, with the batch and the one mode of recomputation
    that are best for them, and those that the search takes."""
    from plait_autoparallel.words import described, recomputed

    print("| model | ranks | their axes | step | the plan | step |\n|" + "---|" * 6)
    for model, world, samples, axes in PUBLISHED:
        if only not in (f"{model}_{world}", ""):
            continue
        result = found([f"model={model}", "train.seq_len=8192", f"train.local_batch_size={samples}"], world)
        if isinstance(result, Exception):
            print(f"| {model} | {world} | {result} |", flush=True)
            continue
        large = [{a.name: a.degree for a in o.candidate.composition.layout.dense if a.degree > 1} for o in result.hand]
        theirs = fastest([o for o, own in zip(result.hand, large, strict=True) if own == axes])
        cells = [
            f"{described(o.candidate)}; {recomputed(o.mix.modes)} | {o.mix.total.seconds:.3f} s" if o else "- | -"
            for o in (theirs, result.best)
        ]
        print(f"| {model} | {world} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    command, *rest = sys.argv[1:] or ["speed"]
    commands = {"speed": speed, "one": one, "gains": gains, "published": published}
    commands.get(command, lambda *_: print(__doc__))(*rest)
