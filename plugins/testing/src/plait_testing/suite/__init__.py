"""The conformance suite: subclass it, name a strategy and what it can do, and get every test of the contract."""

from plait_testing.suite.composition import Combination
from plait_testing.suite.discovery import Discovery
from plait_testing.suite.numerics import Numerics
from plait_testing.suite.resources import Resources
from plait_testing.suite.state import State


class StrategySuite(Combination, Resources, State, Numerics, Discovery):
    """All tests of the contract for one strategy; `capabilities.Capabilities` explains what to set."""
