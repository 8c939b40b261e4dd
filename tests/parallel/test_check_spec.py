"""A spec that does not fit its model is refused in one sentence, before any rank starts."""

import attrs
import pytest
import torch

from plait.contract.errors import PlaitError
from plait.parallel.check_spec import check_spec
from plait_testing.models import MODELS, llama3


def refused(model, **changes):
    with pytest.raises(PlaitError) as caught:
        check_spec(model, attrs.evolve(model.spec(), **changes))
    return str(caught.value).removeprefix("the model's spec names ")


@pytest.fixture
def model():
    with torch.device("meta"):
        return llama3(n_layers=12)


@pytest.fixture
def odd():
    with torch.device("meta"):
        return MODELS["odd"]()


FIELDS = ["blocks", "branches", "routers", "row_means", "before", "after", "attention", "mixers", "documents"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_pattern_that_matches_nothing(model, field):
    one = field in ("attention", "documents")  # a strategy would leave attention as it is, which would train wrong
    assert refused(model, **{field: "embeddings.*" if one else ("embeddings.*",)}) == (
        f"'embeddings.*' in `{field}`, but no module matches that pattern"
    )


def test_a_router_counts(model):
    says = "'layers.0.ffn_norm' in `routers`, but it has no 'now': a router counts copies of tokens in int64 buffers"
    assert says in refused(model, routers=("layers.*.ffn_norm",))


def test_elementwise_parameters_have_one_dim(model):
    says = "in `elementwise`, which must match parameters of 1 dim, and only these; it matches"
    assert refused(model, elementwise=("layers.*.sink",)) == f"'layers.*.sink' {says} none"
    assert refused(model, elementwise=("output.weight",)) == f"'output.weight' {says} some of 2 dims"
    assert check_spec(model, attrs.evolve(model.spec(), elementwise=("layers.*.ffn_norm.weight",))) is None


def test_biases_are_parameters(model):
    says = "in `biases`, but no parameter matches that pattern"
    assert refused(model, biases=("layers.*.ffn_norm",)) == f"'layers.*.ffn_norm' {says}"
    assert check_spec(model, attrs.evolve(model.spec(), biases=("layers.*.ffn_norm.weight",))) is None


def test_what_writes_for_a_branch_is_one_too(model):
    says = "says in `writers` that 'layers.*.w2' writes the result of 'layers.*.attention': both must be patterns in"
    assert says in refused(model, writers={"layers.*.attention": "layers.*.w2"})


def test_within_a_block_or_around_blocks(model):
    assert refused(model, after=("layers.11.ffn_norm",)) == (
        "'layers.11.ffn_norm' in `after`, but it is in the block 'layers.11'"
    )
    assert refused(model, before=("layers.1",)) == "'layers.1' in `before`, but it is in the block 'layers.1'"
    assert refused(model, before=("layers",)) == "'layers' in `before`, but it holds the block 'layers.0'"
    assert refused(model, before=("",)) == "'' in `before`, but it holds the block 'layers.0'"


def test_overlaps(model, odd):
    once = "; name each module once"
    assert refused(model, after=("norm", "output", "tok_embeddings")) == (
        f"'tok_embeddings' in `after`, which overlaps 'tok_embeddings' in `before`{once}"
    )
    assert refused(model, after=("norm", "*")).endswith(once)
    unblocked = {"blocks": (), "branches": (), "attention": None}
    assert refused(odd, after=("trunk", "readout", "trunk.ln"), **unblocked) == (
        f"'trunk.ln' in `after`, which overlaps 'trunk' in `after`{once}"
    )


def test_a_shared_parameter_belongs_to_all_or_none(odd):
    said = "too; name all modules that share a parameter, or none"
    assert refused(odd, after=()) == f"'words' in `before`, but 'readout.weight' is one of its parameters {said}"
    assert refused(odd, before=()) == f"'readout' in `after`, but 'words.weight' is one of its parameters {said}"
    assert check_spec(odd, attrs.evolve(odd.spec(), before=("places",), after=("trunk.ln",))) is None


def test_an_end_that_is_not_named_is_fine(model):
    assert check_spec(model, attrs.evolve(model.spec(), before=(), after=("norm",))) is None
