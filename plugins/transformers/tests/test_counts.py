"""Which attributes of a branch count heads, and the matrix that each follows."""

import pytest
from torch import nn

from plait_transformers.counts import counting
from plait_transformers.shrink import HEADS

INNER, KEYS = 8 * HEADS, 4 * HEADS


class Attention(nn.Module):
    def __init__(self, **counts: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(5, INNER), nn.Linear(5, KEYS)
        for name, count in counts.items():
            setattr(self, name, count)


@pytest.mark.parametrize("of_keys", ["num_kv_heads", "num_key_value_heads"])
def test_heads_follow_queries_and_key_heads_keys(of_keys):
    branch = Attention(num_heads=HEADS, **{of_keys: HEADS // 2}, inner_size=INNER, head_dim=8, layer_idx=HEADS)
    nothing, numbers, products = counting("attn", branch, INNER, KEYS, {"attn.q": 0, "attn.k": 0})
    assert nothing == {}
    assert numbers == {"attn": {"num_heads": ("attn.q", 0, 0), of_keys: ("attn.k", 0, 0)}}
    assert products == {"attn": {**numbers["attn"], "inner_size": ("attn.q", 0, 0)}}


def test_the_only_key_head_is_counted_by_every_rank():
    branch = Attention(num_heads=HEADS, num_key_value_heads=HEADS // 2)
    _, numbers = counting("attn", branch, INNER, KEYS, {"attn.q": 0, "attn.k": 1})
    assert numbers == {"attn": {"num_heads": ("attn.q", 0, 0)}}
