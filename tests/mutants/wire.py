"""Bugs of what travels in the place of a parameter: scales of a part, values of an earlier step, lost gradients."""

from typing import Any

from tests.mutants.planted import Mutant

FORM = "plait_float8/linear.py"
GRADIENTS: dict[str, Any] = {"test": "test_gradients_equal_one_process", "strategy": "float8"}
OFF = "gradients are wrong; the first is"

MUTANTS = [
    Mutant(
        "the scale of a weight's row is taken over a rank's part of it",
        FORM,
        "        own = scale[held_indices(stored, 0)]\n",
        "        own = scale_of(local.abs().amax(1, keepdim=True))\n",
        says=OFF,
        on={"layout": "tensor_parallel"},
        **GRADIENTS,
    ),
    Mutant(
        "the scale of an input's row is taken over a rank's part of it",
        FORM,
        "if x_ND.shape[-1] < self.in_features:",
        "if x_ND.shape[-1] < 0:",
        says=OFF,
        on={"layout": "tensor_parallel"},
        **GRADIENTS,
    ),
    Mutant(
        "the gradient of a rounded input is doubled, in one process too",
        FORM,
        "return grad, None",
        "return 2 * grad, None",
        says="its numerics are its own, but averaged over ranks",
        on={"layout": "alone"},
        **GRADIENTS,
    ),
    Mutant(
        "the gradient of a weight with a wire form is doubled",
        "plait/parallel/wire.py",
        "return grad.to(ctx.dtype), None",
        "return 2 * grad.to(ctx.dtype), None",
        says="its numerics are its own, but averaged over ranks",
        on={"layout": "tensor_parallel"},
        **GRADIENTS,
    ),
    Mutant(
        "the gradient of a weight that travels in a form is not summed",
        "plait_simplefsdp/shard.py",
        "ctx.stored.on_shards(grad.to(summed), Partial())",
        "ctx.stored.on_shards(grad.to(summed), Replicate())",
        says=OFF,
        on={"layout": "simplefsdp"},
        **GRADIENTS,
    ),
    Mutant(
        "a weight that travels in a form keeps the values of the first step",
        "plait_fsdp2/wire.py",
        "            overwrite(self.values, values)\n",
        "            assert overwrite\n",
        test="test_losses_of_20_steps_equal_one_process",
        says="the loss of step",
        strategy="float8",
        on={"layout": "fsdp2"},
    ),
    Mutant(
        "a strategy gathers what is stored, not its wire form",
        "plait_fsdp2/wire.py",
        "extend(param, Gathering(param, traveller))",
        "assert extend",
        test="test_composes_with",
        says="the loss of step",
        strategy="fsdp2",
        on={"other": "float8"},
    ),
]
