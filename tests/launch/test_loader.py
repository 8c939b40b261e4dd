"""A run is composed once, and what it gets is what Hydra's own loader composes."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hydra
import pytest
from hydra.core.config_search_path import SearchPathElement
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from plait.compose.compose import CONFIG, composed
from plait.compose.hydra_internals import ConfigLoader, loading
from plait.compose.loader import Loader
from plait.compose.options import Options
from plait.contract.errors import PlaitError

SETTING_THE_MODE = """# @package _global_
hydra:
  mode: MULTIRUN
"""


def both(argv: list[str], make: Any) -> tuple[Any, Any]:
    """(config, Hydra's own config) that a task gets."""
    found: list[tuple[Any, Any]] = []

    def task(cfg: Any) -> None:
        found.append(tuple(OmegaConf.to_container(c, resolve=False) for c in (cfg, HydraConfig.get())))

    with loading(make), mock.patch("sys.argv", ["plait", *argv]):
        hydra.main(config_path=CONFIG, config_name="train", version_base="1.3")(task)()
    return found[-1]


@pytest.mark.parametrize(
    "argv",
    [[], ["strategy=[fsdp2]", "strategy.fsdp2.shard=2"], ["+hydra.job.env_set.A=1", "train.steps=3"]],
    ids=str,
)
def test_a_run_gets_what_hydra_composes(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert both(argv, Loader) == both(argv, ConfigLoader)


def counting() -> Any:
    real = ConfigLoader._load_configuration_impl
    return mock.patch.object(ConfigLoader, "_load_configuration_impl", autospec=True, side_effect=real)


def test_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with counting() as made:
        composed(lambda cfg: None, ["strategy=[fsdp2]"])
    assert made.call_count == 1


def test_an_error_that_names_its_argument_does_not_list_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlaitError, match=r"^unknown key train\.stpes; ") as caught:
        composed(lambda cfg: None, ["run.name=a", "train.stpes=3"])
    assert "run.name" not in str(caught.value)


def test_a_mode_that_a_config_sets_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "many.yaml").write_text(SETTING_THE_MODE)
    modes: list[str] = []
    argv = ["--config-dir", "conf", "+recipe=many", "train.steps=1,2", "hydra.sweep.dir=runs"]
    composed(lambda cfg: modes.append(HydraConfig.get().mode.name), argv)
    assert modes == ["MULTIRUN", "MULTIRUN"]


def test_an_error_is_that_of_composing_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with counting() as made, pytest.raises(PlaitError, match=r"unknown key train\.stpes; available: .*mean 'steps'"):
        composed(lambda cfg: None, ["train.stpes=1"])
    assert made.call_count == 2  # as a run, and as a sweep, which it could be


def test_a_copy_of_the_options_has_sources_of_its_own(tmp_path: Path) -> None:
    """Hydra copies them for each composition, and gives the copy the folders that this one names."""
    Plugins.instance()  # finds the kinds of sources
    elements = [SearchPathElement("main", "pkg://plait.conf")]
    path = SimpleNamespace(get_path=lambda: elements)
    options = Options(path)
    shipped = options.load_config("optimizer/adamw.yaml").path
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/adamw.yaml").write_text("lr: 1\n")
    copied = copy.deepcopy(options)
    elements.append(SearchPathElement("command-line", f"file://{tmp_path}"))
    copied.initialize_sources(path)
    assert copied.load_config("optimizer/adamw.yaml").path == f"file://{tmp_path}"
    assert options.load_config("optimizer/adamw.yaml").path == shipped != f"file://{tmp_path}"
