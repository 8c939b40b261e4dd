"""What simplefsdp's passes gain by their own estimate: python benchmarks/planned.py [--model NAME] [--ranks N]

Traces one step of a model on a fake process group, without weights or a GPU, and plans its graphs for H100s: exposed
communication (during which nothing is computed) of forward and backward together without passes and with each set, the
bound of perfect overlap, and the peak of memory that the graph's own values need.
"""

import argparse
import copy
import logging
from typing import Any

import torch
from machine import about
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

SETS = ([], ["bucket_block"], ["bucket_block", "reorder"], ["bucket_block", "reorder", "memory"],
        ["bucket_auto", "reorder"], ["bucket_auto", "reorder", "memory"])  # fmt: skip


def traced(model: str, ranks: int, batch: int, seq_len: int) -> list[tuple[Graph, str]]:
    """The forward and the backward graph of one rank of `ranks`, before any pass."""
    import plait_simplefsdp.compile as whole
    from plait import Compile, Precision
    from plait.compose.build import build_model
    from plait.contract.config import Config, Train
    from plait.host import compose
    from plait.parallel.apply import set_up
    from plait.parallel.assembly import assemble_model
    from plait.strategies.registry import create

    found: list[tuple[Graph, str]] = []
    plan = whole.plan

    def noted(graph: Graph, kind: str, *arguments: Any) -> dict[str, Any]:
        found.append((copy.deepcopy(graph), kind))
        return plan(graph, kind, *arguments)

    whole.plan = noted
    config = Config(
        train=Train(seq_len=seq_len),
        precision=Precision("float32", "bfloat16", "float32"),
        compile=Compile(enabled=True, backend="aot_eager"),
    )
    try:
        built, spec = build_model(compose(f"model={model}".split()).model)
        own = {"simplefsdp": create("simplefsdp", {"passes": []})}
        applied = set_up(assemble_model(built, spec, own, config, ranks, "cpu"), fill=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            part = applied.parts[0].to_empty(device="cpu")
            tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
            part(tokens).float().sum().backward()
    finally:
        whole.plan = plan
        torch._dynamo.reset()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="samples per rank")
    parser.add_argument("--seq-len", type=int, default=8192)
    asked = parser.parse_args()

    from plait import Cluster
    from plait.parallel.simulated import simulated
    from plait_simplefsdp.estimate import Machine
    from plait_simplefsdp.plan import plan

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    print(f"{about()}\nESTIMATED, NOT MEASURED\n")
    print(f"## {asked.model}, {asked.ranks} ranks of H100, {asked.batch} x {asked.seq_len} tokens per rank, bfloat16\n")
    print("Times in ms; exposed: communication during which nothing is computed; bound: the least that could be.\n")
    print("| passes | collectives | communication | compute | exposed | relative to none | bound | peak, GiB |")
    print("|---|---|---|---|---|---|---|---|")
    h100 = Machine.of(Cluster.shipped()["h100"])
    without, keys = None, ("communication_ms", "compute_ms", "exposed_ms", "bound_ms")
    with simulated(asked.ranks):
        graphs = traced(asked.model, asked.ranks, asked.batch, asked.seq_len)
        for passes in SETS:
            reports = [plan(copy.deepcopy(graph), kind, passes, h100)["after"] for graph, kind in graphs]
            sent, computed, exposed, bound = (sum(r[key] for r in reports) for key in keys)
            count = sum(e["count"] for r in reports for e in r["collectives"].values())
            without = without or exposed
            peak = max(r["peak_bytes"] for r in reports) / 2**30
            times = f"{sent:.2f} | {computed:.2f} | {exposed:.2f} | {exposed / without:.2f} | {bound:.2f}"
            print(f"| {' + '.join(passes) or 'none'} | {count} | {times} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
