"""Packed documents: gradients are those of the documents alone, whatever mixes tokens."""

import pytest
import torch
from families import OfFamily
from grid import BOUND
from test_families import check

from plait.parallel.initialize import initialise, materialise

LENGTHS = ((7, 9), (1, 15), (16,))  # of the documents of each row
KINDS = {  # what mixes tokens -> family
    "gated delta rule": "qwen3_next",
    "gated delta rule, negative too": "olmo_hybrid",
    "Kimi's delta rule": "kimi_linear",
    "Mamba 2": "nemotron_h",
    "Mamba 2 beside attention": "falcon_h1",
    "Mamba": "jamba",
    "short convolution": "lfm2",
    "lightning attention": "minimax",
    "attention of latents": "deepseek_v3",
    "heads of unequal width": "gemma4_text",
}
BEFORE = ("qwen3_next", "nemotron_h", "lfm2", "minimax")  # of which ranks are tried too


def in_float64(trial):
    model = trial.build()
    materialise(model, "cpu")
    initialise(model, model.spec(), seed=0)
    return model.double()


def gradients(model, called):
    """called: (logits, their weights in the loss), of which there may be several."""
    model.zero_grad()
    sum((logits * weights).sum() for logits, weights in called).backward()
    return {fqn: torch.zeros_like(p) if p.grad is None else p.grad.clone() for fqn, p in model.named_parameters()}


def worst(found, wanted):
    whole = torch.stack([g.norm() for g in wanted.values()]).norm()
    return max(float((found[n] - g).norm() / torch.maximum(g.norm(), 1e-3 * whole)) for n, g in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize("what", KINDS)
def test_gradients_of_packed_documents_are_those_of_documents_alone(what):
    trial = OfFamily(kind=KINDS[what])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 64, (len(LENGTHS), 16), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in LENGTHS])
    weights = torch.randn(*tokens.shape, 64, generator=generator, dtype=torch.float64)
    with trial.computing():
        model = in_float64(trial)
        pieces = [
            (model(x[None]), w[None])
            for row, each in enumerate(LENGTHS)
            for x, w in zip(tokens[row].split(each), weights[row].split(each), strict=True)
        ]
        wanted = gradients(model, pieces)
        assert worst(gradients(model, [(model(tokens, positions), weights)]), wanted) < BOUND
        assert worst(gradients(model, [(model(tokens), weights)]), wanted) > 1e-3  # as one document: another function


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [{"fsdp2": {}}, {"tensor_parallel": {"degree": 2}, "fsdp2": {}}], ids=str)
@pytest.mark.parametrize("kind", BEFORE)
def test_ranks_keep_documents_apart(kind, strategies, plait_ranks):
    check(plait_ranks, kind, strategies, 4, documents=True)
