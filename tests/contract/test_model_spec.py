"""What a model says of itself."""

import pytest

from plait import ModelSpec


@pytest.mark.parametrize(
    "key", ["blocks", "branches", "mixers", "routers", "row_means", "elementwise", "biases", "before", "after"]
)
def test_names_may_be_given_as_a_list(key):
    """A spec is compared and kept, so what it holds does not change."""
    given = ["blocks.*.mlp", "blocks.*.attention"]
    spec = ModelSpec(axes={}, **{key: given})
    given.clear()
    assert getattr(spec, key) == ("blocks.*.mlp", "blocks.*.attention")
