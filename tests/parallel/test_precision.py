"""Who makes a model compute in another dtype than the one that it is stored in."""

import attrs
import pytest
import torch
from torch import nn

import plait
from plait import ModelSpec, hookimpl
from plait.contract.config import Precision
from plait.parallel.simulated import simulated


@attrs.define(slots=False)
class Ghost:
    """Adds ranks with rows of their own."""

    claims: tuple[str, ...] = ("gradient_sum",)
    name = "ghost"

    @hookimpl
    def build_mesh(self):
        return [plait.MeshAxis("ghost", 2, splits="batch")]


@pytest.mark.parametrize(
    ("claims", "computed"),
    [
        (("gradient_sum",), torch.bfloat16),
        (("gradient_sum", "parameter_sharding"), torch.float32),  # who gathers parameters casts them too
    ],
)
def test_the_core_casts_what_no_strategy_shards(claims, computed):
    with simulated(2):
        model, spec = nn.Embedding(4, 2), ModelSpec(axes={"weight": ("vocab", "embed")})
        applied = plait.apply(model, spec, [Ghost(claims)], precision=Precision("float32", "bfloat16", "float32"))
        (part,) = applied.parts
        assert part(torch.arange(4)).dtype == computed
        assert part.weight.dtype == torch.float32


def test_an_embedding_rounds_rows_and_not_its_table():
    """In the result 2^-8 of a row is lost; the gradient of a row that 300 tokens have is their sum in float32."""
    with simulated(1):
        model, spec = nn.Embedding(4, 2), ModelSpec(axes={"weight": ("vocab", "embed")})
        applied = plait.apply(model, spec, [], precision=Precision("float32", "bfloat16", "float32"))
        (part,) = applied.parts
        with torch.no_grad():
            part.weight.copy_(torch.linspace(1, 2, 8).view(4, 2))
        tokens = torch.tensor([0] * 300 + [1])
        rows = part(tokens)
        assert torch.equal(rows, part.weight[tokens].bfloat16())
        (rows * torch.tensor(1.0078125, dtype=torch.bfloat16)).sum().backward()
        expected = torch.tensor([[300 * 1.0078125] * 2, [1.0078125] * 2, [0, 0], [0, 0]])
        assert torch.equal(part.weight.grad, expected)
