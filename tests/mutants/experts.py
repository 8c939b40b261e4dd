"""Bugs of experts: their rows, their gradients, and what balances them."""

from tests.mutants.planted import Mutant

WRAP = "plait_fsdp2/wrap.py"
TENSOR = "plait_tensor_parallel/shard.py"
EXCHANGE = "plait_expert_parallel/exchange.py"
BALANCE = "plait/parallel/expert_balance.py"

MUTANTS = [
    Mutant(
        "the gradients of experts are divided by the ranks that share them",
        WRAP,
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(2.0 if type(module).__name__ == 'FSDPExperts' else 1.0)",
        "test_gradients_equal_one_process",
        "the first is 'layers.1.feed_forward.experts.w1'",
        strategy="expert_parallel",
        on={"layout": "fsdp2 4 x ep 2"},
    ),
    Mutant(
        "results come back in the order in which experts computed them",
        EXCHANGE,
        "_Permute.apply(y_ND, dispatched.back, dispatched.order)",
        "_Permute.apply(y_ND, dispatched.order, dispatched.back)",
        "test_gradients_equal_one_process",
        "gradients are wrong",
        strategy="expert_parallel",
        on={"layout": "fsdp2 2 x ep 2"},
    ),
    Mutant(
        "experts are told how many rows they had in the call before",
        EXCHANGE,
        "x_ND, counts_L = _Permute.apply(x_ND, order_N, back_N), theirs_RL.sum(0)",
        "counts_L = vars(self.axis).pop('before', theirs_RL.sum(0))\n"
        "        vars(self.axis)['before'] = theirs_RL.sum(0)\n"
        "        x_ND = _Permute.apply(x_ND, order_N, back_N)",
        "test_gradients_equal_one_process",
        "split_sizes to sum exactly to",
        strategy="expert_parallel",
        on={"layout": "fsdp2 2 x ep 2"},
    ),
    Mutant(
        "every tensor rank sends all rows, so that a token is computed twice",
        EXCHANGE,
        "rows * index // count, rows * (index + 1) // count",
        "0, rows",
        "test_gradients_equal_one_process",
        "gradients are wrong",
        strategy="expert_parallel",
        on={"layout": "fsdp2 2 x tp 2 x ep 2"},
    ),
    Mutant(
        "the gradient of a router is not summed over the ranks that share its tokens",
        TENSOR,
        "            transform_param(module, name, _transform(place",
        "            summed = summed and not fqn.endswith('router')\n"
        "            transform_param(module, name, _transform(place",
        "test_gradients_equal_one_process",
        "2 of 47 gradients are wrong; the first is 'layers.1.feed_forward.router.weight'",
        strategy="expert_parallel",
        on={"layout": "fsdp2 2 x tp 2 x ep 2"},
    ),
    Mutant(
        "the balance of experts is updated from one rank's tokens",
        BALANCE,
        "dist.all_reduce(counts,",
        "dist.all_reduce(counts.clone(),",
        "test_buffers_after_20_steps_equal_one_process",
        "buffers on rank",
        strategy="expert_parallel",
        on={"layout": "fsdp2 2 x ep 2"},
    ),
    Mutant(
        "recomputation counts the tokens of experts once more",
        "plait_models/moe.py",
        "self.now.copy_(counts_X)",
        "self.seen.add_(counts_X)",
        "test_recomputation_changes_nothing",
        "differ; the first is 'layers.1.feed_forward.router.counts'",
        strategy="expert_parallel",
        on={"mode": "full"},
    ),
    Mutant(
        "the balance loss of a sequence counts one rank's tokens",
        "plait/parallel/row_means.py",
        "for axis in self._axes:",
        "for axis in ():",
        "test_models_equal_one_process",
        "gradients are wrong",
        strategy="context_parallel",
        on={"model": "moe"},
    ),
    Mutant(
        "the balance of experts on ranks without logits is not scaled",
        "plait/parallel/applied.py",
        "            self._divisor(tokens)  # ranks",
        "            self.balance._scaled = True  # ranks",
        "test_models_equal_one_process",
        "gradients are wrong",
        strategy="pipeline",
        on={"model": "moe"},
    ),
    Mutant(
        "a router is updated after every micro-batch",
        BALANCE,
        "        torch._foreach_add_([r.seen for r in routers], [r.now for r in routers])\n",
        "        torch._foreach_add_([r.seen for r in routers], [r.now for r in routers])\n"
        "        for router in routers:\n            router.counts.copy_(router.seen)\n            router.update()\n",
        "test_accumulation_equals_one_big_batch",
        "gradients are wrong",
        strategy="expert_parallel",
    ),
]
