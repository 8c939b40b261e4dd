"""Planned against measured: python benchmarks/ranking.py [--cycles N] [--model NAME] [--ranks N] [--batch B]

Calibrates this machine for that many ranks, takes every layout that a search for it considers, each with the batch and
recomputation that are planned to be fastest, and measures them: all run in the same processes and take turns, one step
each. A step takes as long as its slowest rank. Prints the layouts by planned time, Spearman's correlation of the two
orders, how far the plan is from the fastest, and the gain over the best plan by hand, planned and measured.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from autoparallel import by_hand, fastest, found, usual_batch
from machine import about
from overhead import ratio
from scipy.stats import spearmanr
from turns import arguments, as_rank, slowest

NODES = "PLAIT_BENCHMARK_NODES"  # a file with the configs to measure, for the ranks
QUIET = ["validation.interval=0", "checkpoint.enabled=false", "metrics.tensorboard=false"]


def calibrated(folder: str, ranks: int) -> None:
    """Writes conf/cluster/here.yaml in `folder`."""
    command = [sys.executable, "-m", "plait", "calibrate", "name=here", f"ranks={ranks}", "device=cpu"]
    subprocess.run(command, cwd=folder, check=True)


def searched(asked: Any, folder: str) -> tuple[dict[str, tuple[Any, dict[str, Any]]], str]:
    """Layout -> (how it is scored, config of a run that uses it), the plan first; and the best plan by hand."""
    from plait.host import compose
    from plait_autoparallel.words import described, recomputed

    shape = [f"model={asked.model}", f"train.seq_len={asked.seq_len}", f"train.local_batch_size={asked.batch}"]
    here = os.getcwd()
    os.chdir(folder)
    try:
        result = found([*shape, *QUIET], asked.ranks, ["strategy=[autoparallel]", "cluster=here", "launch.device=cpu"])
        if isinstance(result, Exception):
            raise result
        hand = fastest(usual_batch([one for one in result.hand if by_hand(one)]))
        nodes = {}
        for one in [result.best, *result.others, hand]:
            name = f"{described(one.candidate)}; {recomputed(one.mix.modes)}"
            options = one.candidate.composition.strategies
            node = compose([*shape, *QUIET, f"strategy=[{','.join(options)}]", "launch.device=cpu",
                            f"train.global_batch_size={asked.batch * asked.ranks}"]).plain()  # fmt: skip
            for key, given in options.items():
                node["strategy"][key].update(given)
            node["train"]["local_batch_size"] = one.candidate.rows
            blocks = [b for s in result.segments for b in s.blocks]
            node["remat"].update(mode="none", blocks=dict(zip(blocks, one.mix.modes, strict=True)))
            nodes[name] = (one, node)
    finally:
        os.chdir(here)
    return nodes, f"{described(hand.candidate)}; {recomputed(hand.mix.modes)}"


def as_rank_of(cycles: int, warm_up: int) -> None:
    import logging

    from plait.contract.config import Config
    from plait.parallel.process_group import start_group
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    start_group("cpu")

    def step_of(node: dict[str, Any], folder: Path) -> Any:
        folder.mkdir(exist_ok=True)
        (folder / "versions.json").write_text("{}", encoding="utf-8")
        trainer = Trainer(Config.of(node), RunFolder(folder), lambda text: None)
        trainer.restore()

        def step() -> None:
            trainer.train_step()[0].row()

        return step

    nodes = json.loads(Path(os.environ[NODES]).read_text(encoding="utf-8"))
    as_rank({name: step_of(node, Path(str(i))) for i, (name, node) in enumerate(nodes.items())}, cycles, warm_up)


def main() -> None:
    asked = arguments(__doc__, "llama3_debug", 2)
    if asked.as_rank:
        return as_rank_of(asked.cycles, asked.warm_up)
    print(f"{about()}\nNOT MEASURED ON A GPU\n\n## {asked.model}, {asked.ranks} ranks, {asked.batch} x {asked.seq_len} "
          "tokens per rank, float32\n")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="plait-ranking-") as folder:
        calibrated(folder, asked.ranks)
        layouts, hand = searched(asked, folder)
        os.environ[NODES] = str(Path(folder, "nodes.json"))
        Path(folder, "nodes.json").write_text(
            json.dumps({name: node for name, (_, node) in layouts.items()}), encoding="utf-8"
        )
        spent = slowest(__file__, asked)
    planned = {name: one.mix.total.seconds for name, (one, _) in layouts.items()}
    measured = {name: float(np.median(seconds)) for name, seconds in spent.items()}
    print("| layout | planned | measured |\n|---|---|---|")
    for name in sorted(planned, key=planned.__getitem__):
        print(f"| {name} | {1e3 * planned[name]:.1f} ms | {1e3 * measured[name]:.1f} ms |")
    names = list(planned)
    order = spearmanr([planned[n] for n in names], [measured[n] for n in names]).statistic
    plan, first = names[0], min(measured, key=measured.__getitem__)
    print(f"\n{len(names)} layouts; Spearman's correlation {order:.2f}")
    print(f"the plan takes {ratio([spent[plan]], [spent[first]], np.median)} of the fastest measured, {first}")
    print(f"the best plan by hand, {hand}, takes {planned[hand] / planned[plan]:.3f} of the plan as planned, "
          f"{ratio([spent[hand]], [spent[plan]], np.median)} as measured")  # fmt: skip


if __name__ == "__main__":
    main()
