"""Bugs of pipelines: micro-batches and stages."""

from tests.mutants.planted import Mutant

PIPELINE = "plait_pipeline/"

MUTANTS = [
    Mutant(
        "a micro-batch is dropped by the schedule",
        PIPELINE + "__init__.py",
        "self._steps.run(parts, list(inputs), loss)",
        "self._steps.run(parts, list(inputs)[1:], loss)",
        "test_accumulation_equals_one_big_batch",
        "loss for the micro-batches [0] instead of [0, 1]",
        strategy="pipeline",
    ),
    Mutant(
        "stages are swapped",
        PIPELINE + "cut.py",
        "    return [rank + options.degree * turn",
        "    return [options.degree - 1 - rank + options.degree * turn",
        "test_gradients_equal_one_process",
        "this stage needs the stream before it",
        strategy="pipeline",
        on={"layout": "gpipe pp 2"},
        timeout=20,
    ),
    Mutant(
        "gradients are divided by the number of micro-batches",
        PIPELINE + "steps.py",
        "scale_grads=False",
        "scale_grads=True",
        "test_accumulation_equals_one_big_batch",
        "gradients are wrong",
        strategy="pipeline",
    ),
]
