"""A second start takes its graphs and their report from a cache, and only if all is the same that they depend on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from chain import Chain
from torch import fx, nn

from plait import Compile, Precision, Remat
from plait.parallel.simulated import simulated
from plait_simplefsdp import cached, inductor
from plait_simplefsdp.estimate import Machine
from plait_testing.trial import Trial

OTHER = {  # of each field another value; a new field has to be added here
    Remat: {"mode": "full", "budget": 0.25, "blocks": {"steps.0": "full"}},
    Compile: {"enabled": True, "backend": "aot_eager", "mode": "max-autotune-no-cudagraphs", "fullgraph": False},
    Precision: {
        "storage": "float64",
        "param": "bfloat16",
        "reduce": "float64",
        "optimizer": "bfloat16",
        "rounding": "stochastic",
    },
    Machine: {
        "name": "other",
        "flops": {torch.float32: 2.0},
        "memory": 2.0,
        "link": (1.0, 2.0),
        "latency": (1.0, 2.0),
        "node": 4,
    },
}
MACHINE = Machine("one", {torch.float32: 1.0}, 1.0, (1.0, 1.0), (1.0, 1.0))


class Two(nn.Module):
    def __init__(self, width: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def key(
    world=2, model=None, owner="steps.0", number=0, expected=("all_gather",), blocks=("steps.0",), passes=(), **changed
):
    given = {cls: changed.get(cls.__name__, MACHINE if cls is Machine else cls()) for cls in OTHER}
    model = model or Two()
    graph = fx.symbolic_trace(model)
    next(n for n in graph.graph.nodes if n.target == "a").meta["custom"] = {
        "plait_block": owner,
        "plait_number": number,
    }
    config = SimpleNamespace(remat=given[Remat], compile=given[Compile], precision=given[Precision])
    with simulated(world):
        return cached.key_of(
            graph,
            model,
            SimpleNamespace(config=config, device_type="cpu"),
            passes=list(passes),
            machine=given[Machine],
            expected={"forward": set(expected)},
            blocks=list(blocks),
            again=set(blocks),
        )


def test_whatever_a_graph_depends_on_changes_its_key(monkeypatch):
    found = {"as it is": key()}
    assert key() == found["as it is"]
    for cls, values in OTHER.items():
        base = MACHINE if cls is Machine else cls()
        for field in attrs.fields(cls):
            found[f"{cls.__name__}.{field.name}"] = key(
                **{cls.__name__: attrs.evolve(base, **{field.name: values[field.name]})}
            )
    found["ranks"] = key(world=4)
    found["kinds of collectives"] = key(expected=())
    found["passes"] = key(passes=("reorder",))
    found["blocks"] = key(blocks=("steps.1",))
    found["the block of a node"] = key(owner="steps.1")
    found["the parameter of a node"] = key(number=1)
    found["shapes"], found["ties"] = key(model=Two(8)), key(model=Two(tied=True))
    found["dtype"] = key(model=Two().double())
    frozen = Two()
    frozen.a.weight.requires_grad_(False)
    found["what is trained"] = key(model=frozen)
    strided = Two()
    strided.a.weight = nn.Parameter(strided.a.weight.detach().clone().T)
    found["strides"] = key(model=strided)
    monkeypatch.setattr(cached, "groups", lambda: [["0", [0, 1]], ["1", [1]]])
    found["groups"] = key()
    monkeypatch.undo()
    monkeypatch.setattr(cached, "code", lambda: "another version")
    found["code"] = key()
    monkeypatch.undo()
    monkeypatch.setattr(cached, "SELECTIVE_KEEPS", frozenset({"aten::mm"}))
    found["what selective keeps"] = key()
    assert None not in found.values()
    same = {a: b for a in found for b in found if a < b and found[a] == found[b]}
    assert not same, "these have one key"


def test_the_keys_of_a_run_depend_on_its_options_and_its_cluster(monkeypatch):
    """Passes move collectives by what the cluster's links take."""
    made = []
    monkeypatch.setattr(inductor, "of_inductor", lambda *given: made.append(given))
    faster = attrs.evolve(MACHINE, memory=2.0)
    ways = [({}, MACHINE), ({}, MACHINE), ({}, faster), ({"passes": []}, MACHINE)]
    with simulated(2):
        for options, machine in ways:
            monkeypatch.setattr(Machine, "of", lambda cluster, machine=machine: machine)
            Trial(Chain, compile="inductor").apply({"simplefsdp": options})
        first, again, *others = [known(fx.symbolic_trace(Two())) for *_, known in made]
    assert first == again
    assert len({first, *others}) == 3


def test_what_no_text_tells_apart_is_not_cached():
    def made(scale):
        return lambda x: x * scale

    graph = fx.Graph()
    graph.output(graph.call_function(made(2), (graph.placeholder("x"),)))
    with pytest.raises(cached.Unknown):
        cached.traced(fx.GraphModule({}, graph))
    with pytest.raises(TypeError, match="a key holds no object"):
        cached.plain({"a": [object()]})


def test_a_report_belongs_to_its_graph(tmp_path, monkeypatch):
    """The key of torch's caches is drawn with the report, so neither is found without the other."""
    monkeypatch.setattr(cached, "cache_folder", lambda: tmp_path)
    told = []
    first = cached.KeptReport("k", told.append)
    first.tell()
    assert told == []
    first.add({"graph": "forward", "n": 1})
    first.add({"graph": "backward", "n": 2})
    assert [one["n"] for one in told] == [1, 2]

    again = cached.KeptReport("k", told.append)
    assert again.key == first.key
    again.add({"graph": "backward", "n": 3})  # only forward came from the cache
    again.tell()
    assert [one["n"] for one in told] == [1, 2, 3, 1]
    assert cached.KeptReport("l", told.append).key != first.key

    (file,) = tmp_path.rglob("k.json")
    file.write_text(file.read_text()[:-9])  # as a full disk leaves it
    lost = cached.KeptReport("k", told.append)
    assert lost.key != first.key
    lost.tell()
    assert len(told) == 4
    assert cached.KeptReport(None, told.append).key is None


START = """
import json, sys
import torch
from torch._dynamo.utils import counters
from chain import Chain
from plait.parallel.simulated import simulated
from plait_testing.trial import Trial
import plait_simplefsdp.compile as compiled
from plait_simplefsdp.report import Report
reports, planned, plan, add = [], [], compiled.plan, Report.add
compiled.plan = lambda *given, **more: (planned.append(given[1]), plan(*given, **more))[1]
Report.add = lambda self, report: (reports.append(report), add(self, report))
options = json.loads(sys.argv[1])
with simulated(2):
    trial = Trial(Chain, dtype="float64", compile="inductor")
    applied = trial.apply({"simplefsdp": options})
    tokens, _ = trial.batch(0)
    applied.parts[0](tokens).sum().backward()
print(json.dumps([counters["aot_autograd"]["autograd_cache_hit"], planned, reports]))
"""


def start(cache: Path, options="{}"):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", START, options], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    hits, planned, reports = json.loads(done.stdout.splitlines()[-1])
    return hits, planned, {report["graph"]: report for report in reports}


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_reports_the_same(tmp_path):
    """In a new process, whose hashes of strings are others."""
    hits, planned, reports = start(tmp_path)
    assert (hits, planned, set(reports)) == (0, ["forward", "backward"], {"forward", "backward"})
    assert start(tmp_path) == (1, [], reports)
    hits, planned, other = start(tmp_path, '{"passes": []}')
    assert (hits, planned) == (0, ["forward", "backward"])
    assert other != reports


def trained(cache, options):
    """A run's result, and how many graphs came from the cache."""
    from torch._dynamo.utils import counters

    from plait_testing.trial import Trial, train

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    try:
        torch._dynamo.reset()
        counters.clear()
        result = train(Trial(Chain, dtype="float64", compile="inductor", micro=2), {"simplefsdp": options})
        return counters["aot_autograd"]["autograd_cache_hit"], result
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


@pytest.mark.slow
def test_a_run_from_the_cache_is_bitwise_the_same(plait_ranks, tmp_path):
    cold, warm = (plait_ranks.run(trained, str(tmp_path), {}, world=2, timeout=280) for _ in range(2))
    for (before, first), (hits, second) in zip(cold, warm, strict=True):
        assert (before, hits) == (0, 2)  # the other is the loss
        for name in ("losses", "norms"):
            assert getattr(first, name) == getattr(second, name)
        for name in ("gradients", "final"):
            one, two = getattr(first, name), getattr(second, name)
            assert all(torch.equal(one[fqn], two[fqn]) for fqn in one)
