"""What a compiled block recomputes where ranks divide the work."""

import attrs
import pytest
import torch

import plait
from plait import hookimpl
from plait.contract.config import Compile, Remat
from plait.ops import cross_entropy_sum
from plait.parallel.simulated import simulated
from plait_testing.models import llama3
from plait_testing.trial import batch

PRODUCTS, HEAD = 7, 1  # matrix products of a block's forward, and of what follows


@attrs.define(slots=False)
class Ghost:
    """Adds two ranks that divide this, and sums nothing."""

    splits: str
    claims = ("gradient_sum", "sequence")
    name = "ghost"

    @hookimpl
    def build_mesh(self):
        return [plait.MeshAxis("ghost", 2, splits=self.splits)]


@pytest.fixture(autouse=True)
def compiled_afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("splits", "again"), [("batch", PRODUCTS - 1), pytest.param("sequence", PRODUCTS, marks=pytest.mark.slow)]
)
def test_full_recomputation_leaves_out_the_last_product_if_ranks_divide_the_batch_alone(splits, again):
    """Else a graph may hold meshes, and the block is computed again as it is."""
    with simulated(2):
        with torch.device("meta"):
            model = llama3(n_layers=1)
        options = {"remat": Remat("full"), "compile": Compile(True, "aot_eager")}
        (part,) = plait.apply(model, model.spec(), [Ghost(splits)], **options).parts
        tokens, labels = batch(0)
        loss = cross_entropy_sum(part(tokens), labels)
        with torch.profiler.profile() as profile:
            loss.backward()
    counts = {e.key: e.count for e in profile.key_averages()}
    assert counts["aten::mm"] == 2 * (PRODUCTS + HEAD) + again
