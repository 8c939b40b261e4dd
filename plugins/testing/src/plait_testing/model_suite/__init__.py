"""The suite of models: subclass it, name a model, and get every test of what a model owes to strategies."""

from plait_testing.model_suite.computing import Computing
from plait_testing.model_suite.cut import Cut
from plait_testing.model_suite.described import Described
from plait_testing.model_suite.filled import Filled


class ModelSuite(Described, Filled, Computing, Cut):
    """All tests of one model; `subject.Subject` explains what to set."""
