"""What `plait.testing` exports: the only list of it, for type checkers and for `testing.py`."""

from plait_testing.count import Collective as Collective
from plait_testing.count import Counting as Counting
from plait_testing.errors import is_about as is_about
from plait_testing.errors import raises_about as raises_about
from plait_testing.model_suite import ModelSuite as ModelSuite
from plait_testing.optimizer_suite import OptimizerSuite as OptimizerSuite
from plait_testing.parity import apart as apart
from plait_testing.parity import assert_same as assert_same
from plait_testing.parity import unequal as unequal
from plait_testing.parity import worst_gradient as worst_gradient
from plait_testing.project import Project as Project
from plait_testing.suite import StrategySuite as StrategySuite
from plait_testing.suite.capabilities import Layout as Layout
from plait_testing.trial import Trial as Trial
from plait_testing.trial import TrialResult as TrialResult
from plait_testing.trial import batch as batch
from plait_testing.trial import documents as documents
from plait_testing.trial import forward_backward as forward_backward
from plait_testing.trial import full as full
from plait_testing.trial import share as share
from plait_testing.trial import take_step as take_step
from plait_testing.trial import train as train
from plait_testing.trial import whole as whole
