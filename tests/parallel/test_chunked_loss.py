"""The loss by chunks: the same gradients, far less memory for logits, and clear errors."""

import weakref

import attrs
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import plait
from plait.ops import Normal
from plait_testing.errors import is_about
from plait_testing.parity import assert_same, worst_gradient
from plait_testing.trial import Trial, train


@pytest.mark.parametrize("model", ["llama3", "odd", "moe"])
@pytest.mark.parametrize("chunks", [3, 200])  # 128 tokens: uneven chunks, and some without tokens
def test_one_process_computes_the_same(plait_ranks, model, chunks):
    (plain,) = plait_ranks.once(train, Trial(model, steps=2), world=1)
    assert_same(plait_ranks.run(train, Trial(model, steps=2, chunks=chunks), world=1), plain)


def test_bfloat16_rounds_as_without_chunks(plait_ranks):
    """Each of the two is as far from float64 as the other: gradients of chunks are added in float32."""
    trial = Trial(steps=1)
    (exact,) = plait_ranks.once(train, trial, world=1)
    mixed = attrs.evolve(trial, dtype="mixed")
    (plain,) = plait_ranks.once(train, mixed, world=1)
    (found,) = plait_ranks.run(train, attrs.evolve(mixed, chunks=4), world=1)
    assert worst_gradient(found, exact)[0] <= 1.5 * worst_gradient(plain, exact)[0]


VOCAB, TOKENS = 128_256, 64


class Tiny(nn.Module):
    """An embedding and a head. head: the name that its spec gives. capped: its logits are."""

    def __init__(self, vocab=16, head="output", capped=False):
        super().__init__()
        self.embed, self.output = nn.Embedding(vocab, 8), nn.Linear(8, vocab, bias=False)
        self.head, self.capped = head, capped

    def forward(self, ids):
        logits = self.output(self.embed(ids))
        return torch.tanh(logits) if self.capped else logits

    def spec(self):
        return plait.ModelSpec(axes={"*.weight": ("vocab", "embed")}, init={"*.weight": Normal(0.02)}, head=self.head)


def applied_to(model, chunks, seq_len):
    return plait.apply(model, model.spec(), loss=plait.Loss(chunks), seq_len=seq_len)


def peak_of_logits(chunks, frozen=False):
    """(most bytes at any moment of tensors with a column per entry of the vocabulary, operations, products with a row
    per entry) of one step. frozen: the head does not train."""

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.now, self.peak, self.known, self.scaled = 0, 0, set(), 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor):
                self.scaled += bool(result.dim()) and len(result) == VOCAB
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == VOCAB:
                    self.see(tensor.untyped_storage())
            return result

        def see(self, storage):
            key, size = storage._cdata, storage.nbytes()
            if key not in self.known:
                self.known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, key, size)

        def forget(self, key, size):
            self.known.discard(key)
            self.now -= size

    applied = applied_to(Tiny(VOCAB), chunks, TOKENS)
    applied.parts[0].output.weight.requires_grad_(not frozen)
    ids = torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as flops, Watch() as watch:
        applied.forward_backward([plait.Batch(ids, ids)], TOKENS)
    return watch.peak, flops.get_total_flops(), watch.scaled


def test_eight_chunks_need_a_sixth_of_the_memory_and_no_more_operations(plait_ranks):
    ((plain, flops, _),) = plait_ranks.run(peak_of_logits, 1, world=1)
    ((chunked, again, copies),) = plait_ranks.run(peak_of_logits, 8, world=1)
    assert again == flops == 3 * 2 * TOKENS * VOCAB * 8
    assert plain >= 2 * TOKENS * VOCAB * 4
    assert TOKENS * VOCAB * 4 // 8 <= chunked <= plain / 6
    assert copies == 0  # the head's gradient, of gigabytes, is scaled where it is
    ((_, without, _),) = plait_ranks.run(peak_of_logits, 8, frozen=True, world=1)
    assert without == 2 * 2 * TOKENS * VOCAB * 8  # a head that does not train costs no gradient


def asked(head, wrong=""):
    """The error of a step by chunks of a model whose spec names `head`."""
    ids = torch.arange(6)[None]
    try:
        applied = applied_to(Tiny(head=head, capped=wrong == "capped"), 3, 6)
        if wrong == "divided":
            applied.parts[0].output.weight = nn.Parameter(applied.parts[0].output.weight[:8].detach())
        applied.forward_backward([plait.Batch(ids, ids[:, :-1] if wrong == "labels" else ids)], 6)
    except plait.PlaitError as error:
        return error
    return None


def test_a_model_that_cannot_is_refused(plait_ranks):
    for head, wrong in (("output", "capped"), (None, ""), ("embed", "")):
        is_about(plait_ranks.run(asked, head, wrong, world=1)[0], "loss.chunks", 3, fits=[1])
    assert "labels" in str(plait_ranks.run(asked, "output", "labels", world=1)[0])
    assert "plait.divide_head" in str(plait_ranks.run(asked, "output", "divided", world=1)[0])
    assert plait_ranks.run(asked, "output", world=1)[0] is None
