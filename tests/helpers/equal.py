"""Results of ranks, compared with that of one process."""

from plait.testing.parity import apart, unequal, worst_gradient


def equal(results, expected):
    for result in results:
        assert unequal(result.initial, expected.initial) is None
        assert result.gradients.keys() == expected.gradients.keys()
        error, parameter = worst_gradient(result, expected)
        assert error <= 1e-10, f"{parameter} is off by {error:.1e}"
        assert apart(result.losses, expected.losses)[0] <= 1e-9
        assert apart(result.norms, expected.norms)[0] <= 1e-9
        assert set(result.final) == set(expected.final)
