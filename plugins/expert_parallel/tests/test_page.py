"""The table of combinations in docs/expert-parallel.md is what the tests run."""

from pathlib import Path

import pytest
import test_conformance as conformance  # as a module: its class is not to be collected twice

PAGE = Path(__file__).parents[3] / "docs" / "expert-parallel.md"


def table():
    """A row for every layout of the conformance tests: over which axes what is divided, and how often it is there."""
    rows = ["| layout | ranks | experts | all else |", "|---|---|---|---|"]
    for name, layout in conformance.LAYOUTS.items():
        dense, experts = conformance.TestExpertParallel()._assembled(layout)
        rows.append(f"| {name} | {layout.world} | {words(experts)} | {words(dense)} |")
    return "\n".join(rows)


def words(axes):
    return " x ".join(f"`{a.name}` {a.degree}" for a in axes if a.degree > 1) or "one copy"


MISSING = len(conformance.TestExpertParallel.layouts) < len(conformance.LAYOUTS)


@pytest.mark.skipif(not PAGE.exists(), reason="the plugin lies outside of Plait's repository")
@pytest.mark.skipif(MISSING, reason="a strategy of some layout is not installed")
def test_the_combinations_are_those_tested():
    assert table() in PAGE.read_text()
