"""Which of other ranks' elements fill a rank's part."""

import pytest
import torch

from plait.checkpoint.chunks import taken

WHOLE = [[[0, 0], [0, 0], [8, 3]]]
ROWS = {0: [[[0, 0], [0, 0], [3, 3]]], 1: [[[3, 0], [0, 0], [5, 3]]]}
PACKED = {  # rows 0, 1, 4, 5 and 2, 3, 6, 7: a share of each half
    0: [[[0, 0], [0, 0], [2, 3]], [[4, 0], [2, 0], [2, 3]]],
    1: [[[2, 0], [0, 0], [2, 3]], [[6, 0], [2, 0], [2, 3]]],
}
COLUMNS = {0: [[[0, 0], [0, 0], [8, 1]]], 1: [[[0, 1], [0, 0], [8, 2]]], 2: [[[0, 3], [0, 0], [8, 0]]]}
LAYOUTS = {"one": {0: WHOLE}, "replicas": {0: WHOLE, 1: WHOLE}, "rows": ROWS, "packed": PACKED, "columns": COLUMNS}


def part(chunks):
    """What the rank with these chunks holds of a tensor that counts its elements."""
    whole = torch.arange(24).view(8, 3)
    return torch.cat([whole[r : r + n, c : c + m] for (r, c), _, (n, m) in chunks])


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_every_layout_is_filled_from_every_other(before, after):
    held = LAYOUTS[before]
    for chunks in LAYOUTS[after].values():
        expected = part(chunks)
        result = torch.full_like(expected, -1)
        for rank, _, source, target in taken("weight", chunks, held):
            result[target] = part(held[rank])[source]
        assert torch.equal(result, expected)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "packed", "columns"])
def test_a_part_that_nobody_holds(layout, lost):
    held = {rank: chunks for rank, chunks in LAYOUTS[layout].items() if rank != lost}
    assert taken("weight", WHOLE, held) is None
