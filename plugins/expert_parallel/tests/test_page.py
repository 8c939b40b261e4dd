"""The table of combinations in docs/expert-parallel.md is what the tests run."""

import math
from pathlib import Path

import pytest
import test_conformance as conformance  # as a module: its class is not to be collected twice
import torch

PAGE = Path(__file__).parents[3] / "docs" / "expert-parallel.md"


HEAD = "| layout | ranks | experts | an expert's gradient is summed over | all else |\n|---|---|---|---|---|"


def table():
    """A row for every layout of the conformance tests: over which axes what is divided, and who sums."""
    rows = [HEAD]
    for name, layout in conformance.LAYOUTS.items():
        assembly = conformance.TestExpertParallel()._assembly(layout)
        found = assembly.layout
        experts, left = found.views["experts"], found.data_axes("experts")
        cells = (name, layout.world, words(experts), summing(experts, left), words(found.dense))
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def words(axes):
    return " x ".join(f"`{a.name}` {a.degree}" for a in axes if a.degree > 1) or "one copy"


def summing(axes, over):
    """The groups of ranks that differ along the axes `over` alone."""
    shape = [a.degree for a in axes]
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    kept = [i for i, a in enumerate(axes) if a not in over]
    count = math.prod(shape[i] for i in kept)
    groups = ranks.permute(*kept, *(i for i in range(len(axes)) if i not in kept)).reshape(count, -1).tolist()
    return ", ".join("{" + ", ".join(map(str, group)) + "}" for group in groups) if len(groups[0]) > 1 else "-"


MISSING = len(conformance.TestExpertParallel.layouts) < len(conformance.LAYOUTS)


@pytest.mark.skipif(not PAGE.exists(), reason="the plugin lies outside of Plait's repository")
@pytest.mark.skipif(MISSING, reason="a strategy of some layout is not installed")
def test_the_combinations_are_those_tested():
    assert table() in PAGE.read_text()
