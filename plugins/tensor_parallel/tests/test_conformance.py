"""tensor_parallel keeps the contract."""

import math

from plait.strategies.registry import installed
from plait.testing import Collective, Layout, StrategySuite

FSDP2 = "fsdp2" in installed() and installed()["fsdp2"].state == "ok"
LOSS = 3  # all-reduces of a number a token: the largest logit, the sum of exponentials, the label's logit


class TestTensorParallel(StrategySuite):
    strategy = "tensor_parallel"
    axes = ("tp",)
    slow = (  # models whose branches and vocabulary are divided as those of llama3 and moe
        *(*StrategySuite.slow, "test_a_run_equals", "test_composes_with", "test_float32"),
        *("test_mixed_precision_stays", "test_nothing"),
        *(f"test_models_equal_one_process[{model}" for model in ("odd", "mla", "tied", "qk_norm")),
    )
    quick = ("test_packed_documents",)
    layouts = {
        "tp 4": Layout(4, {"degree": 4}),
        "tp 2": Layout(2, {"degree": 2}),
        **({"fsdp2 x tp": Layout(4, {"degree": 2}, {"fsdp2": {}})} if FSDP2 else {}),
    }

    def held(self, shape, axes, degree):
        tp, data = degree["tp"], degree.get("dp_shard", 1)
        divided = {"heads", "ffn", "vocab"} | ({"kv_heads"} if tp <= 2 else set())  # the models have 2 of these heads
        if divided & set(axes):
            return math.prod(shape) // tp // data
        return math.ceil(shape[0] / data) * math.prod(shape[1:])

    def collectives(self, size, degree):
        tp, data = degree["tp"], degree.get("dp_shard", 1)
        stream = size.tokens // data * size.dim  # elements of the residual stream that a group of tensor ranks has
        blocks = len(size.blocks)
        branches = 2 * blocks
        norms = (branches + 1) * size.dim
        heads = 2 * blocks if tp > 2 else 0  # wk and wv where there are fewer key and value heads than ranks
        whole = norms + heads * size.dim**2 // 2
        local = (size.elements - whole) // tp + whole
        last = (size.blocks[-1].elements - 2 * size.dim) // tp + 2 * size.dim
        of_blocks = sum((block.elements - 2 * size.dim) // tp + 2 * size.dim for block in size.blocks)
        tokens = size.tokens // data
        units = blocks + (1 if size.uses.tensors > size.tensors else 2)  # of fsdp2: what is tied is one
        moved = [
            # Forward and backward: into each branch and out of it, out of the embedding, into the head.
            Collective("all_gather", "tp", 2 * branches + 2, (2 * branches + 2) * stream),
            Collective("reduce_scatter", "tp", 2 * branches + 2, (2 * branches + 2) * stream),
            # Gradients of what every rank has, and the loss.
            Collective("all_reduce", "tp", branches + 1 + heads + LOSS, whole + LOSS * tokens),
        ]
        if data > 1:  # fsdp2 moves what a tensor rank has
            moved += [
                Collective("all_gather", "dp_shard", units + blocks - 1, local + of_blocks - last),
                Collective("reduce_scatter", "dp_shard", units, local),
            ]
        return moved
