"""Options of one name: two packages are refused, and the user's own file comes before any package's."""

import re

import pytest
import yaml

from plait import PlaitError
from plait.host import compose
from plait.testing import raises_about
from tests.helpers.fakes import distribution, forget

PACKAGES = ("pack-a", "pack-b")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Where `pack-a` and `pack-b` are installed, which ship models."""
    (tmp_path / "site").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path / "work")
    for name in PACKAGES:
        distribution(tmp_path / "site", name, {name: "Ghost"})
        package = name.replace("-", "_")
        (tmp_path / "site" / f"{package}-1.0.dist-info" / "entry_points.txt").write_text(
            f"[plait.models]\nmodels = {package}\n"
        )
    yield tmp_path / "site"
    forget(tmp_path)


def option(conf, name, text):
    file = conf / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def both(site, name, text="steps: {}\n"):
    return [option(site / p.replace("-", "_") / "conf", name, text.format(n)) for n, p in enumerate(PACKAGES, 1)]


@pytest.mark.parametrize("group", ["model", "cluster", "recipe", "recipe/deep"])
def test_an_option_of_two_packages_is_refused_if_it_is_selected(site, group):
    first, second = both(site, f"{group}/tiny")
    add = "+" if group.startswith(("recipe", "hardware")) else ""
    with raises_about(group, "tiny") as caught:
        compose([f"{add}{group}=tiny"])
    assert str(caught.value) == (
        f"{group}=tiny is defined twice: by pack-a ({first}) and by pack-b ({second}); "
        f"uninstall one, or copy the one to use to ./conf/{group}/tiny.yaml"
    )
    assert compose([]).run.name is None  # others do not matter


def test_one_that_a_recipe_selects_is_refused(site, tmp_path):
    both(site, "model/tiny")
    option(tmp_path / "work" / "conf", "recipe/mine", "# @package _global_\ndefaults: [{override /model: tiny}]\n")
    with pytest.raises(PlaitError, match="model=tiny is defined twice"):
        compose(["+recipe=mine"])


def test_two_files_of_options_for_a_strategy(site):
    both(site, "strategy/fsdp2", "# @package strategy.fsdp2\nshard: {}\n")
    with pytest.raises(PlaitError, match=r"strategy=fsdp2 is defined twice: by pack-a .* by pack-b .*; uninstall one$"):
        compose(["strategy=[fsdp2]"])


@pytest.mark.parametrize(("name", "arguments"), [("model/llama3_1b", ["model=llama3_1b"]), ("optimizer/adamw", [])])
def test_a_package_does_not_replace_what_plait_ships_nor_is_it_ignored(site, name, arguments):
    mine = option(site / "pack_a" / "conf", name, "lr: 1\n")
    key = name.replace("/", "=")
    ours, theirs = rf"\(.*{name}.yaml\)", rf"by pack-a \({re.escape(str(mine))}\)"
    said = f"{theirs} and by plait-models {ours}" if arguments else f"by plait {ours} and {theirs}"
    with pytest.raises(PlaitError, match=f"{key} is defined twice: {said}"):
        compose(arguments)
    if arguments:
        assert compose([])


def test_the_user_s_own_option_comes_first(site, tmp_path):
    both(site, "model/tiny")
    own = tmp_path / "work" / "conf"
    option(own, "model/tiny", "steps: 7\n")
    option(own, "model/llama3_1b", "steps: 8\n")
    option(own, "train", "steps: 9\n")  # is no option
    assert compose(["model=tiny"]).model == {"steps": 7}
    assert compose(["model=llama3_1b"]).model == {"steps": 8}
    option(tmp_path / "extra", "model/tiny", "steps: 10\n")
    assert compose(["model=tiny", "--config-dir", str(tmp_path / "extra")]).model == {"steps": 10}
    named = [f"hydra.searchpath=[file://{tmp_path / 'extra'}]"]
    assert compose(["model=tiny", *named]).model == {"steps": 10}


def test_one_file_by_two_paths_is_one(site, tmp_path):
    file, _ = both(site, "model/tiny")
    (site / "pack_b" / "conf" / "model" / "tiny.yaml").unlink()
    (site / "pack_b" / "conf" / "model" / "tiny.yaml").symlink_to(file)
    assert compose(["model=tiny"]).model == {"steps": 1}


def test_each_job_of_a_sweep_is_told(plait_project, site):
    both(site, "model/tiny")
    done = plait_project("train", "-m", "model=tiny,llama3_debug", "train.steps=0", "launch.device=cpu")
    assert done.code == 1
    assert "model=tiny is defined twice" in done.out + done.err


def test_all_are_listed(plait_project, site):
    both(site, "model/tiny")
    option(site / "pack_a" / "conf", "model/llama3_1b", "steps: 8\n")
    done = plait_project("plugins")
    assert done.code == 0
    assert done.err.count("\n") == 2
    assert "plait: model=tiny is defined twice: by pack-a " in done.err
    assert re.search("plait: model=llama3_1b is defined twice: by pack-a .* and by plait-models ", done.err)
    assert yaml.safe_load(plait_project("plugins", "--json").out)


def test_a_file_that_was_written_again_is_read_again(site):
    file = option(site.parent / "work" / "conf", "recipe/mine", "# @package _global_\ntrain: {steps: 3}\n")
    assert compose(["+recipe=mine"]).train.steps == 3
    assert compose(["+recipe=mine", "train.steps=4"]).train.steps == 4
    assert compose(["+recipe=mine"]).train.steps == 3, "what a run was told has no effect on the next"
    file.write_text("# @package _global_\ntrain: {steps: 5}\n")
    assert compose(["+recipe=mine"]).train.steps == 5
