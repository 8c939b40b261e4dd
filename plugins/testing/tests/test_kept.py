"""A strategy that keeps state of its own passes the tests of checkpoints, beside others and on its own."""

import pytest

from plait.testing import Layout, StrategySuite
from plait_testing.trial import train
from tests.checkpoint.test_own_state import STRATEGY


class Ghostly(StrategySuite):
    strategy = "ghost"
    layouts = {"alone": Layout(1), "sharded": Layout(2, {}, {"fsdp2": {}})}  # noqa: RUF012

    def reference(self, layout, trial):
        return train(trial, self.selected(layout))


@pytest.fixture
def ghost(install_ghost):
    return install_ghost(STRATEGY.replace("class Keeper", "class Ghost"))


@pytest.mark.slow
def test_names_are_those_of_one_process(ghost):
    Ghostly().test_checkpoint_has_the_names_of_one_process(ghost)
    Ghostly().test_checkpoint_holds_the_optimizer(ghost)
    Ghostly().test_checkpoint_holds_what_one_process_holds(ghost)


@pytest.mark.parametrize("layout", [pytest.param("sharded", marks=pytest.mark.slow), "alone"])
def test_other_layouts_load_it(ghost, layout, tmp_path_factory):
    """The last one also under every other installed strategy, none of which has its state."""
    Ghostly().test_checkpoint_loads_in_other_layouts(ghost, layout, tmp_path_factory)
