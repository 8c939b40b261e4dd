"""The picture in docs/tensor-parallel.md is what `plait inspect` says."""

from pathlib import Path

import pytest

from plait.commands.inspect import report
from plait.host import compose

PAGE = Path(__file__).parents[3] / "docs" / "tensor-parallel.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the plugin lies outside of Plait's repository")
def test_the_table_is_inspects():
    text = report(compose(["strategy=[tensor_parallel]", "model.n_layers=1", "launch.device=cpu"]))
    table = text[text.index("parameter  ") :].partition("\n\n")[0]
    assert f"```text\n{table}\n```" in PAGE.read_text()
