"""Weights in files, converted: what the files hold, and what stays in memory. No transformers here."""

import gc
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from plait.checkpoint import weights
from plait.checkpoint.init_from import check_weights
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.checkpoint.sums import SUMS
from plait.checkpoint.weight_files import INDEX
from plait.compose.build import build_model
from plait.contract.errors import PlaitError
from plait.ops import HuggingFace, Rule
from plait.parallel.initialize import initialise, materialise
from plait.parallel.state import canonical_state, integers, shapes, tied_names
from plait_models.convert import convert, from_hf, to_hf
from plait_models.hugging_face.deepseek import Neighbours
from plait_testing.models import moe, qk_norm
from plugins.models.tests.converting import MODELS, real, same, state_of, whole, written


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param]


def test_there_and_back(make, tmp_path):
    model = written(make, tmp_path / "a")
    convert(model, tmp_path / "a", tmp_path / "b", "hf")
    convert(model, tmp_path / "b", tmp_path / "c", "plait")
    assert same(whole(tmp_path / "c"), whole(tmp_path / "a"))
    check_weights(tmp_path / "c", shapes(model), tied_names(model), integers=integers(model))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]


def test_shards(make, tmp_path):
    model = written(make, tmp_path / "a")
    convert(model, tmp_path / "a", tmp_path / "one", "hf")
    convert(model, tmp_path / "a", tmp_path / "some", "hf", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "some" / INDEX).read_text())
    files = sorted(p.name for p in (tmp_path / "some").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert {name: file for file in files for name in load_file(tmp_path / "some" / file)} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole(tmp_path / "one").values())
    assert same(whole(tmp_path / "some"), whole(tmp_path / "one"))
    convert(model, tmp_path / "some", tmp_path / "back", "plait", max_shard_bytes=20_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    check_weights(tmp_path / "back", shapes(model), tied_names(model), integers=integers(model))
    assert same(whole(tmp_path / "back"), whole(tmp_path / "a"))


def test_dtypes_stay(tmp_path):
    model = written(MODELS["deepseek"], tmp_path / "a")
    half = {n: t.bfloat16() if t.dim() > 1 else t for n, t in whole(tmp_path / "a").items()}
    (tmp_path / "half").mkdir()
    save_file(half, tmp_path / "half" / "model.safetensors")
    convert(model, tmp_path / "half", tmp_path / "b", "hf")
    there = whole(tmp_path / "b")
    assert there["model.layers.1.mlp.experts.3.up_proj.weight"].dtype is torch.bfloat16
    assert there["model.layers.1.mlp.gate.e_score_correction_bias"].dtype is torch.float32
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    convert(model, tmp_path / "b", tmp_path / "c", "plait")
    assert same(whole(tmp_path / "c"), half)


def test_a_checkpoint_is_a_source(make, tmp_path):
    model = written(make, tmp_path / "a")
    Saver(Store(tmp_path), "sync").save(canonical_state(model)[0], 7)
    convert(model, tmp_path / "a", tmp_path / "b", "hf")
    convert(model, tmp_path / "step-7", tmp_path / "c", "hf")
    assert same(whole(tmp_path / "b"), whole(tmp_path / "c"))


def test_experts_lie_one_by_one_there(tmp_path):
    model = real(MODELS["qwen3 experts"])
    there = to_hf(model)
    for i in range(8):
        assert torch.equal(
            there[f"model.layers.1.mlp.experts.{i}.down_proj.weight"], model.layers["1"].feed_forward.experts.w2[i]
        )
    assert not any("bias" in name or "counts" in name for name in there)


def test_neighbours_by_hand():
    rows = torch.arange(10.0)[:, None]  # two heads: one number that stays, and two pairs
    assert Neighbours(unit=5, turned=4).to_ours(rows).flatten().tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]
    assert Neighbours(unit=None, turned=4).to_theirs(rows).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 7, 9]
    assert torch.equal(Neighbours(None, 6).to_theirs(Neighbours(None, 6).to_ours(rows)), rows)


def live_bytes():
    storages = {}
    for held in gc.get_objects():
        if issubclass(type(held), torch.Tensor) and held.device.type == "cpu":
            storage = held.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("to", "source"),
    [("hf", "a"), *(pytest.param(*way, marks=pytest.mark.slow) for way in [("hf", "step-7"), ("plait", "b")])],
)
def test_the_model_is_not_held(to, source, tmp_path, monkeypatch):
    """Counted after every read and every tensor made: the file under way, and what one tensor or stack takes."""
    options = {"n_layers": 10, "ffn_dim": 32, "n_experts": 8, "top_k": 2, "dim": 64}
    model = written(lambda: qk_norm(**options), tmp_path / "a")
    Saver(Store(tmp_path), "sync").save(canonical_state(model)[0], 7)
    convert(model, tmp_path / "a", tmp_path / "b", "hf")
    size = sum(tensor.nbytes for tensor in state_of(model).values())
    stack = 8 * 32 * 64 * 4
    del model
    with torch.device("meta"):
        model = qk_norm(**options)
    shard = 2.5 * stack
    gc.collect()
    gc.freeze()  # what there is is not looked at again
    peak = 0

    def count(*_):
        nonlocal peak
        peak = max(peak, live_bytes())

    for name in ("_Safetensors", "_Checkpoint"):
        read = getattr(weights, name).read
        monkeypatch.setattr(getattr(weights, name), "read", counted(read, count))
    try:
        convert(model, tmp_path / source, tmp_path / "c", to, max_shard_bytes=shard, progress=count)
    finally:
        gc.unfreeze()
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 5
    assert 0 < peak <= shard + 2 * stack < size / 5


def counted(read, count):
    def reads(self, *arguments):
        tensor = read(self, *arguments)
        count()
        return tensor

    return reads


def test_what_the_model_does_not_need_is_left_out():
    model = real(moe)
    there = to_hf(model)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    more["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)  # of the module that predicts a second token
    assert same(from_hf(model, there | more), from_hf(model, there))
    with pytest.raises(PlaitError, match=r"has 'model.layers.4.norm.weight'"):
        from_hf(model, there | {"model.layers.4.norm.weight": torch.ones(32)})


def test_what_a_config_may_say_otherwise(tmp_path):
    model = written(lambda: qk_norm(rope_scaling={"factor": 4.0, "original_max_seq_len": 16}), tmp_path / "a")
    convert(model, tmp_path / "a", tmp_path / "b", "hf")
    (tmp_path / "b" / SUMS).unlink()  # a folder that others wrote has none
    path = tmp_path / "b" / "config.json"
    config = json.loads(path.read_text())
    scaling = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}  # what is left out is the default
    path.write_text(json.dumps(config | {"rope_scaling": scaling, "max_position_embeddings": 9, "use_cache": False}))
    convert(model, tmp_path / "b", tmp_path / "c", "plait")
    path.unlink()
    convert(model, tmp_path / "b", tmp_path / "d", "plait")


def test_tied_weights_under_either_name():
    model = real(MODELS["llama3 tied"])
    there = to_hf(model)
    assert "lm_head.weight" not in there
    table = there["model.embed_tokens.weight"]
    want = state_of(model)
    assert same(from_hf(model, there), want)
    assert same(from_hf(model, there | {"lm_head.weight": table.clone()}), want)
    alone = {n: t for n, t in there.items() if t is not table}
    assert same(from_hf(model, alone | {"lm_head.weight": table}), want)
    with pytest.raises(PlaitError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' differ in .* ties them"):
        from_hf(model, there | {"lm_head.weight": table + 1})


class Own(nn.Module):
    """A model of the user's, with a table of its own."""

    def __init__(self, experts=3):
        super().__init__()
        self.parts = nn.ModuleDict({"0": nn.Linear(4, 4, bias=False), "1": nn.Linear(4, 4, bias=False)})
        self.stack = nn.Parameter(torch.randn(experts, 2, 4))

    def hugging_face(self):
        rules = [Rule("parts.*.weight", "h.*.w"), Rule("stack", "experts.*.proj", Neighbours(None, 2))]
        return HuggingFace(rules, {"model_type": "own"})


def test_a_model_of_ones_own(tmp_path):
    model = Own()
    there = to_hf(model)
    assert set(there) == {"h.0.w", "h.1.w", "experts.0.proj", "experts.1.proj", "experts.2.proj"}
    assert same(from_hf(model, there), {n: p.detach() for n, p in model.named_parameters()})
    model.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(PlaitError, match="table for Hugging Face says nothing about 'extra'"):
        to_hf(model)
    with pytest.raises(PlaitError, match=r"^Linear does not say what its tensors are called"):
        to_hf(nn.Linear(2, 2))


TINY = ("model=qwen3_debug", "model.dim=32", "model.n_layers=1", "model.ffn_dim=16")


def test_the_command(plait_project, tmp_path):
    from plait.host import compose

    model, spec = build_model(compose(list(TINY)).model)
    materialise(model, "cpu")
    initialise(model, spec, seed=0)
    (tmp_path / "a").mkdir()
    save_file(state_of(model), "a/model.safetensors")
    done = plait_project("convert", "a", "b", "--to", "hf", *TINY)
    assert done.code == 0
    lines = done.err.splitlines()
    assert 2 < len(lines) < 11
    assert lines[-1] == "100%  model.safetensors"
    assert done.out.startswith("b: ")
    assert done.out.endswith("B in 1 file(s)\n")
    assert plait_project("convert", "--to=plait", "b", "c", *TINY).code == 0
    assert same(whole(tmp_path / "a"), whole(tmp_path / "c"))


@pytest.mark.parametrize("to", ["hf", "plait"])
def test_the_tokenizer_goes_with_the_weights(to, tmp_path):
    model = written(MODELS["llama3"], tmp_path / "a")
    if to == "plait":
        convert(model, tmp_path / "a", tmp_path / "theirs", "hf")
        (tmp_path / "theirs" / "SHA256SUMS").unlink()
    source = tmp_path / ("theirs" if to == "plait" else "a")
    files = {"tokenizer.json": '{"a": "ü"}', "chat_template.jinja": "t", "generation_config.json": "{}"}
    for name, text in files.items():
        (source / name).write_text(text, encoding="utf-8")
    convert(model, source, tmp_path / "b", to)
    assert {name: (tmp_path / "b" / name).read_text(encoding="utf-8") for name in files} == files


def test_the_tokenizer_of_a_checkpoint_is_that_of_its_run(tmp_path):
    model = real(MODELS["llama3"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text("{}")
    for step, name in ((1, "mine"), (2, "gone")):
        data = {"data": {"tokenizer": str(tmp_path / name)}}
        Saver(Store(tmp_path), "sync").save({f"model.{n}": t for n, t in state_of(model).items()}, step, config=data)
        convert(model, tmp_path / f"step-{step}", tmp_path / f"out-{name}", "hf")
        assert (tmp_path / f"out-{name}" / "tokenizer.json").exists() == (name == "mine")
