"""The shipped configs say what the classes say."""

import re
from pathlib import Path

import attrs
import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

import plait_data

FOLDER = Path(plait_data.__file__).parent / "conf/data"


@pytest.mark.parametrize("name", ["stdlib", "text", "hf"])
def test_a_config_has_every_option_with_its_default_and_a_comment(name: str) -> None:
    node = OmegaConf.load(FOLDER / f"{name}.yaml")
    fields = {field.name: field for field in attrs.fields(get_class(node._target_)) if field.init}
    values = OmegaConf.to_container(node)
    del values["_target_"]
    assert set(values) == set(fields)
    for key, value in values.items():
        assert value == ("???" if fields[key].default is attrs.NOTHING else fields[key].default)
    for line in (FOLDER / f"{name}.yaml").read_text().splitlines():
        assert re.search(r"[^ ] # .{10}", line), line


def test_a_config_makes_its_source() -> None:
    node = OmegaConf.load(FOLDER / "hf.yaml")
    node.update(name="json", data_files={"train": ["a.jsonl"]})
    source = instantiate(node)
    assert source.data_files == {"train": ["a.jsonl"]}
    assert type(source.data_files) is dict
    assert type(source.data_files["train"]) is list
