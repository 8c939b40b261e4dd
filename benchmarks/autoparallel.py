"""How long a search takes, what it finds, and what it gains over plans that a person would make.

    python benchmarks/autoparallel.py speed        # the time and memory of the search for large models
    python benchmarks/autoparallel.py gains        # over a grid of models, worlds, memory and batches
    python benchmarks/autoparallel.py published    # beside the layouts of published runs

Times of steps are planned ones, by the cost model of `plait plan`.
"""

import itertools
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
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


def found(overrides: list[str], world: int) -> Any:
    """What a search finds: `plait_autoparallel.search.Found`."""
    from plait import PlaitError
    from plait.launch.check import check
    from plait.launch.compose import resolve
    from plait.plan.engine import _plannable
    from plait_autoparallel import decide

    caught: list[Any] = []
    plain = decide.file.write

    def write(result: Any, *rest: Any) -> str:
        caught.append(result)
        return plain(result, *rest)

    decide.file.write = write
    try:
        check(_plannable(resolve([*COMMON, OURS, *overrides]), []), world)
    except PlaitError as error:
        return error
    finally:
        decide.file.write = plain
    return caught[0]


def speed(only: str = "") -> None:
    """Each search in a process of its own."""
    for name in CASES:
        if only in name:
            subprocess.run([sys.executable, __file__, "one", name], check=True)


def one(name: str) -> None:
    world, overrides, limit = CASES[name]
    start = time.perf_counter()
    result = found(overrides, world)
    taken = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    from plait_autoparallel.words import described, recomputed
    from plait_autoparallel.words import time as said

    print(f"{name}: {taken:.1f} s (to reach: {limit:.0f}), {peak:.2f} GiB", flush=True)
    if isinstance(result, Exception):
        print(f"  {result}")
        return
    best = result.best
    print(f"  {described(best.candidate)}; {recomputed(best.mix.modes)}; {said(best.mix.total.seconds)}")
    print(f"  {result.traced} traced, {len(result.others) + 1} layouts fit, {len(result.short)} do not")


def grid() -> Iterator[tuple[str, int, float, int]]:
    """(model, ranks, bytes of a rank, samples of a rank)."""
    yield from itertools.product(("llama3_1b", "llama3_8b", "qwen3_30b_a3b"), (8, 64), (24e9, 40e9, 78e9), (1, 4))
    yield from itertools.product(("llama3_70b",), (64, 256), (40e9, 78e9), (1, 4))


def gains() -> None:
    """The plan against the best with all blocks alike, over the grid."""
    from plait_autoparallel.words import described, mesh, recomputed

    gained = []
    print("| model | ranks | memory | samples | step | best by hand | gain | from |\n|" + "---|" * 8)
    for model, world, memory, samples in grid():
        overrides = [f"model={model}", "train.seq_len=8192", f"train.local_batch_size={samples}",
                     f"strategy.autoparallel.memory={memory}"]  # fmt: skip
        result = found(overrides, world)
        if isinstance(result, Exception):
            print(f"| {model} | {world} | {memory / 1e9:.0f} GB | {samples} | does not fit | | | |", flush=True)
            continue
        best = result.best
        hand = result.hand[0] if result.hand else None
        gain = hand.mix.total.seconds / best.mix.total.seconds - 1 if hand else float("nan")
        assert not hand or gain >= -1e-9
        gained += [gain] if hand else []
        why = [] if hand else ["nothing by hand fits"]
        if hand and len(set(best.mix.modes)) > 1:
            why.append(f"mixed recomputation ({recomputed(best.mix.modes)})")
        if hand and mesh(hand.candidate) != mesh(best.candidate):
            why.append(f"axes ({mesh(best.candidate)})")
        if hand and hand.candidate.rows != best.candidate.rows:
            why.append(f"{best.candidate.rows} samples at once")
        by_hand = f"{hand.mix.total.seconds:.3f} s, {described(hand.candidate)}" if hand else "-"
        print(f"| {model} | {world} | {memory / 1e9:.0f} GB | {samples} | {best.mix.total.seconds:.3f} s | {by_hand} | "
              f"{100 * gain:.1f}% | {'; '.join(why)} |", flush=True)  # fmt: skip
    print(f"\n{len(gained)} cases; mean gain {100 * sum(gained) / len(gained):.2f}%, most {100 * max(gained):.2f}%")


def published() -> None:
    """Llama 3.1 on as many H100 as published runs had: their axes, and those that the search takes."""
    from plait_autoparallel.words import described

    print("| model | ranks | their axes | step | the plan | step |\n|" + "---|" * 6)
    for model, world, samples, axes in PUBLISHED:
        overrides = [f"model={model}", "train.seq_len=8192", f"train.local_batch_size={samples}"]
        fixed = ", ".join(f"{k}: {v}" for k, v in axes.items())
        theirs = found([*overrides, f"strategy.autoparallel.axes={{{fixed}}}"], world)
        ours = found(overrides, world)
        cells = [
            str(r) if isinstance(r, Exception) else f"{described(r.best.candidate)} | {r.best.mix.total.seconds:.3f} s"
            for r in (theirs, ours)
        ]
        print(f"| {model} | {world} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    command, *rest = sys.argv[1:] or ["speed"]
    {"speed": speed, "one": one, "gains": gains, "published": published}[command](*rest)
