"""What a recorder knows of memory: what is a copy of parameters, and how much of it an operator reads and writes."""

import torch

from plait_plan.tracing.recorder import Recorder
from plait_plan.tracing.where import Where


def recorder() -> Recorder:
    return Recorder(Where([]), {})


def test_only_what_is_computed_from_parameters_alone_is_a_copy_of_them() -> None:
    with recorder() as recorded:
        weight, x = torch.ones(4, 4), torch.ones(4, 4)
        recorded.mark([weight], "parameters")
        cast = weight.bfloat16()
        joined = torch.cat([cast, cast])
        product, mixed = x @ weight, joined[:4] + x
        filled = torch.empty(4, 4)
        filled.copy_(weight)
    copies = [recorded.storage(tensor).copies for tensor in (cast, joined, filled)]
    others = [recorded.storage(tensor).copies for tensor in (x, product, mixed)]
    assert (copies, others) == ([True] * 3, [False] * 3)


def test_an_operator_touches_the_part_of_a_memory_that_its_tensors_are() -> None:
    with recorder() as recorded:
        large, row = torch.ones(8, 16), torch.ones(1, 16)
        large[:2].add_(row.expand(2, 16))
    by_name = {operator.name: touched for operator, touched in zip(recorded.operators, recorded.touched, strict=True)}
    added = by_name["aten::add_"]
    rows = 4 * 16
    assert added.writes == {recorded.storage(large): 2 * rows}
    assert added.reads == {recorded.storage(large): 2 * rows, recorded.storage(row): rows}  # expanded: read once
