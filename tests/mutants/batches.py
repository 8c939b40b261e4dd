"""Bugs of what a rank sees: tokens, their labels and positions, and which other tokens."""

from tests.mutants.planted import Mutant

CONTEXT = "plait_context_parallel/"

MUTANTS = [
    Mutant(
        "the batch is duplicated over the data axis",
        "plait/parallel/mesh.py",
        "index = index * axis.degree + coordinate",
        "index = index * axis.degree",
        "test_every_token_is_seen_once",
        "128 tokens are seen, 64 different",
        on={"layout": "2 shards"},
    ),
    Mutant(
        "labels are cut differently from their tokens",
        CONTEXT + "__init__.py",
        "order.own(labels)",
        "labels.chunk(order.ranks, dim=1)[order.rank]",
        "test_every_token_is_seen_once",
        "tokens have another token's label or position",
        strategy="context_parallel",
        on={"layout": "gather cp 2"},
    ),
    Mutant(
        "positions are those of the next rank",
        CONTEXT + "__init__.py",
        "order.own(positions)",
        "attrs.evolve(order, rank=(order.rank + 1) % order.ranks).own(positions)",
        "test_every_token_is_seen_once",
        "tokens have another token's label or position",
        strategy="context_parallel",
        on={"layout": "gather cp 2"},
    ),
    Mutant(
        "a token sees the key after it",
        CONTEXT + "gather.py",
        "mask = keys <= queries_S[:, None]",
        "mask = keys <= queries_S[:, None] + 1",
        "test_gradients_equal_one_process",
        "gradients are wrong",
        strategy="context_parallel",
        on={"layout": "gather cp 2"},
    ),
    Mutant(
        "a token sees the document before its own",
        CONTEXT + "gather.py",
        "keys >= first_BT[:, own, None]",
        "keys >= first_BT[:, own, None] - 1",
        "test_packed_documents_equal_one_process",
        "gradients are wrong",
        strategy="context_parallel",
    ),
    Mutant(
        "gradients of gathered keys and values are not summed",
        CONTEXT + "gather.py",
        "grad_placements=[Partial()]",
        "grad_placements=[Replicate()]",
        "test_gradients_equal_one_process",
        "gradients are wrong",
        strategy="context_parallel",
        on={"layout": "gather cp 2"},
    ),
    Mutant(
        "each rank draws its own order of the data",
        "plait_data/order.py",
        "    cells = _permute(positions.astype(np.uint64), height, width, key)\n",
        "    import torch.distributed as dist\n\n    key = (*key, dist.get_rank())\n"
        "    cells = _permute(positions.astype(np.uint64), height, width, key)\n",
        "test_a_run_equals_one_process",
        "loss is off",
    ),
    Mutant(
        "data that is already divided over ranks is divided again",
        "plait/data/batches.py",
        "np.arange(index * rows, (index + 1) * rows)",
        "np.arange(index * rows, (index + 1) * rows) // count",
        "test_a_run_equals_one_process",
        "loss is off",
    ),
    Mutant(
        "the last row of a batch is its first once more",
        "plait/parallel/defaults.py",
        "            return tokens, labels, positions\n",
        "            rows = [*range(len(tokens) - 1), 0]\n            return tokens[rows], labels[rows], positions\n",
        "test_every_token_is_seen_once",
        "tokens are seen",
        on={"layout": "2 shards"},
    ),
]
