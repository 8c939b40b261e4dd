"""Floating point operations per token, for `ModelSpec.flops`."""

import attrs


@attrs.frozen
class Flops:
    """6 x parameters + 6 x attention x seq_len: a forward and a backward pass, as torchtitan counts them.

    A product with a parameter costs 2 operations per token in forward and 4 in backward; the scores and their product
    with the values cost as much for every position. There is no discount for causality or recomputation.

    parameters: how many are multiplied with a token: all but an input embedding that is only looked up, and of
        experts only those that a token visits.
    attention: layers x heads x (width of a query head + width of a value head).
    """

    parameters: int
    attention: int

    def __call__(self, seq_len: int) -> int:
        """Operations per token of a sequence of `seq_len` tokens."""
        return 6 * (self.parameters + self.attention * seq_len)
