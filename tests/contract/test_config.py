"""The config of a run: frozen, typed once, with one set of defaults."""

from pathlib import Path

import attrs
import pytest
from omegaconf import OmegaConf

from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.testing import raises_about

FILE = Path(__file__).parents[2] / "conf" / "train.yaml"
NODES = ("strategy", "model", "data", "optimizer", "cluster")  # without types: what they name has its own defaults


def test_the_classes_have_the_defaults_of_train_yaml():
    written = OmegaConf.to_container(OmegaConf.load(FILE))
    assert isinstance(written, dict)
    for name in ("defaults", "hydra", *NODES):
        written.pop(name, None)
    assert {name: value for name, value in Config().plain().items() if name not in NODES} == written


def test_nothing_of_a_config_changes():
    config = Config()
    for owner, name in ((config, "train"), (config.train, "steps"), (config.checkpoint, "init_from")):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(owner, name, None)
    plain = config.plain()
    plain["train"]["steps"] = plain["profile"]["ranks"] = 7
    assert config == Config()


def test_a_config_with_another_value_is_another_one():
    before = Config(model={"_target_": "a.B", "width": 3})
    after = before.with_value("train.steps", 9).with_value("model.width", 4).with_value("strategy", {"x": {}})
    assert (after.train.steps, after.model, after.strategy) == (9, {"_target_": "a.B", "width": 4}, {"x": {}})
    assert before == Config(model={"_target_": "a.B", "width": 3})
    assert Config.of(after.plain()) == after


@pytest.mark.parametrize("key", ["train.stepz", "trains.steps", "train", "steps", "train.steps.more"])
def test_a_key_that_no_run_has_is_refused(key):
    with pytest.raises(PlaitError, match=f"no key {key}"):
        Config().with_value(key, 1)


def test_a_value_that_does_not_fit_is_refused():
    with raises_about("train.steps", "many", "a whole number"):
        Config().with_value("train.steps", "many")
    with raises_about("train.steps", 0, ">= 1"):
        Config().with_value("train.steps", 0)
