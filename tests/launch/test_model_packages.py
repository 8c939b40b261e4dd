"""A package that ships models is found by its entry point, and imported only when one of them is built."""

import json
import sys

import pytest

from plait.contract.errors import PlaitError
from plait.host import check, compose

MODEL = """
from plait_models.llama3 import Llama3

class Tiny(Llama3):
    def __init__(self, width):
        sizes = dict(dim=width, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=32, rope_theta=1e4, norm_eps=1e-5)
        super().__init__(**sizes, vocab_size=300, max_seq_len=64, tie_embeddings=False, rope_scaling=None)
        self.vocab_size = 300
        self.tokenizer_from = None  # its folder
"""
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TOKENIZER = {"version": "1.0", "added_tokens": [{"id": 1, "content": "</s>", **FLAGS}], "model": WORDS}


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    conf = tmp_path / "plait_shipped" / "conf" / "model"
    conf.mkdir(parents=True)
    for folder in (conf, conf.parent, conf.parent.parent):
        (folder / "__init__.py").touch()
    (conf / "shipped.yaml").write_text("_target_: plait_shipped.tiny.Tiny\nwidth: 16\n")
    (conf.parent.parent / "tiny.py").write_text(MODEL)
    info = tmp_path / "plait_shipped-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plait-shipped\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[plait.models]\nshipped = plait_shipped\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("plait_shipped")]:
        del sys.modules[name]


def test_a_model_of_a_package_is_an_option(shipped):
    node = compose(["model=shipped", "model.width=32", "train.seq_len=64"])
    assert node.model == {"_target_": "plait_shipped.tiny.Tiny", "width": 32}
    assert "plait_shipped" not in sys.modules
    assert check(node, 1).shapes["tok_embeddings.weight"] == (300, 32)


def test_a_model_that_is_not_there_lists_those_of_packages(shipped):
    with pytest.raises(PlaitError, match=r"model=ship does not exist; available: .*\bshipped\b"):
        compose(["model=ship"])


def test_the_context_is_read_from_the_model_if_it_is_no_option(shipped):
    with pytest.raises(PlaitError, match=r"train.seq_len=128 is longer than the model's: model.max_seq_len=64"):
        check(compose(["model=shipped", "train.seq_len=128"]), 1)


def test_the_tokenizer_is_the_model_s_unless_another_is_named(shipped, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "plait_shipped" / "tiny.py").write_text(MODEL.replace("None  # its folder", repr(str(tmp_path))))
    run = ["model=shipped", "train.seq_len=64"]
    taken = check(compose(run), 1)
    assert taken.source.encoder.size == 2
    assert taken.config.data["tokenizer"] == str(tmp_path)
    assert check(compose([*run, "data.tokenizer=bytes"]), 1).source.encoder.size == 257
    assert check(compose(["model=llama3_debug"]), 1).source.encoder.size == 257
