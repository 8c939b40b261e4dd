"""The mask of packed documents is made once in a forward, and all blocks see through it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plait
from plait.ops.attention import CausalAttention, DocumentMask, attend, document_mask
from plait_testing.trial import Trial, documents

TOKENS = 23  # no width of these models


def is_mask(x):
    """Whether it has a row of tokens for each token, but not for each head."""
    return isinstance(x, torch.Tensor) and x.shape[-2:] == (TOKENS, TOKENS) and x.numel() == TOKENS**2


class Masks(TorchDispatchMode):
    """made: results that are masks."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made += sum(is_mask(x) for x in tree_leaves(result))
        return result


def masks_of(model, remat):
    """(masks made in forward and backward of a step, those that autograd keeps), and those that one call makes."""
    applied = Trial(model, remat=remat).apply({})
    tokens = torch.randint(0, 60, (1, TOKENS))
    kept = set()

    def note(x):
        if is_mask(x):
            kept.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), Masks() as masks:
        applied.forward_backward([plait.Batch(tokens, tokens, documents(tokens))], TOKENS)
    with Masks() as once:
        DocumentMask()(documents(tokens), torch.float64)
    return masks.made, len(kept), once.made


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("model", ["llama3", "mla", "moe"])
def test_one_mask_for_all_blocks(plait_ranks, model, remat):
    made, kept, once = plait_ranks.once(masks_of, model, remat, world=1)[0]
    assert made == once > 0
    assert kept <= 1  # a mask of its own for each block would stay until backward


HOW = [{}, {"window": 3}, {"softcap": 0.7}, {"sinks": torch.tensor([0.5, -1.0])}, {"window": 2, "softcap": 2.0}]


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("how", HOW, ids=lambda how: "+".join(how) or "plain")
def test_a_mask_means_what_its_positions_mean(how, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 4, dtype=torch.float64, generator=generator) for n in (2, 1, 1))
    positions = documents(torch.zeros(2, 9, dtype=torch.int64))
    sees = document_mask(positions) & torch.ones(9, 9).triu(1 - how.get("window", 9)).bool()
    expected = attend(q, k, v, sees, **{name: value for name, value in how.items() if name != "window"})
    for given in (positions, DocumentMask()(positions, dtype)):
        torch.testing.assert_close(CausalAttention()(q, k, v, given, **how), expected, rtol=0, atol=1e-14)
