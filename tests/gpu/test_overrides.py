"""What the tests here give `plait train` on a GPU composes and passes every check, on any machine."""

import pytest

from plait.host import check, compose
from tests.gpu import test_process, test_training
from tests.helpers.commands import SMALL

COMMANDS = {"trains": test_process.TRAINS, "too much": test_process.TOO_MUCH}
RUNS = {
    "often": test_training.OFTEN,
    "never": test_training.NEVER,
    "compiled": (*test_training.NEVER, *test_training.COMPILED),
}


@pytest.mark.parametrize("overrides", COMMANDS.values(), ids=COMMANDS)
def test_commands(overrides):
    check(compose([*SMALL, *overrides, "launch.device=cpu"]), 1)


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_runs(overrides, tmp_path):
    check(compose(test_training.given("cpu", tmp_path, *overrides)), 1)
