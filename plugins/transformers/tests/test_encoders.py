"""Encoders: masked tokens, attention to both sides, files that AutoModelForMaskedLM reads, and whole runs."""

import functools
import json

import pytest
import torch
from families import keys_of, read
from safetensors.torch import load_file
from test_families import check
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from plait.checkpoint.export import export
from plait.commands.main import run
from plait.host import metrics
from plait.testing import raises_about
from plait_transformers import attention, both_ways, proof
from plait_transformers.build import decoder
from plait_transformers.encoders import is_encoder

KINDS = ("bert", "roberta", "modernbert")
SLOW = pytest.mark.slow
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
IDS = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
TEXT = [f"{n} times {m} is {n * m}, and {'so ' * (n % 4)}on" for n in range(40) for m in range(12)]


def built(kind, **more):
    with torch.device("meta"):
        return decoder(config={**keys_of(kind), **more})


def saved(path, kind, **more):
    """A model of random weights of transformers, after it wrote itself into the folder `path`."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**{**keys_of(kind), **more}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which are zero otherwise
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(path)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a small bert, with a WordPiece tokenizer beside it that has a mask token."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("bert")
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=80, special_tokens=SPECIAL))
    around = {"single": "[CLS] $A [SEP]", "special_tokens": [("[CLS]", 2), ("[SEP]", 3)]}
    inner.post_processor = processors.TemplateProcessing(**around)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(path)
    saved(path, "bert", vocab_size=inner.get_vocab_size(), **IDS)
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    return path


def overrides(folder, name, *more):
    source = f"data.source={{kind: text, path: {folder / 'text.jsonl'}, validation_fraction: 0.2, attention: document}}"
    sizes = (
        "train.seq_len=32",
        "train.global_batch_size=4",
        "train.local_batch_size=2",
        "train.steps=6",
        "validation.interval=3",
    )
    return ["model=transformers", f"model.path={folder}", "data=masked", source, *sizes, f"run.name={name}", *more]


def rows(name):
    return {row["step"]: (row["loss"], row.get("val_loss")) for row in metrics.read(f"runs/{name}/{metrics.FILE}")}


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_what_is_derived(kind):
    spec = built(kind).spec()
    assert not spec.causal
    branch = "bert.encoder.layer.*.attention.self" if kind == "bert" else "model.layers.*.attn"
    assert (spec.branches[0], spec.attention) == (branch, f"{branch}.inner")
    assert spec.sizes == {"heads": 4}
    assert spec.documents == "documents"


def test_which_class_a_configuration_means():
    from transformers import AutoConfig

    said = [
        ("bert", {}, True),
        ("bert", {"architectures": ["BertModel"]}, True),
        ("bert", {"architectures": ["BertForMaskedLM"], "is_decoder": True}, True),
        ("bert", {"architectures": ["BertLMHeadModel"]}, False),
        ("bert", {"is_decoder": True}, False),
        ("modernbert", {}, True),
        ("modernbert-decoder", {}, False),
        ("llama", {}, False),
        ("bart", {}, False),
    ]
    assert [is_encoder(AutoConfig.for_model(kind, **keys)) for kind, keys, _ in said] == [is_one for *_, is_one in said]


def test_positions_begin_behind_the_row_for_padding():
    model = built("roberta")
    assert (model.first_place, model.max_seq_len) == (2, 62)
    assert (built("bert").first_place, built("bert").max_seq_len) == (0, 64)


@pytest.mark.parametrize("fault", ["causal", "window", "documents", "first_place"])
def test_attention_and_positions_that_are_wrong_are_not_used(fault, monkeypatch):
    """The family's own attention is used instead; documents that would see each other, and positions, are refused."""
    plain = both_ways.both_ways

    def broken(q, k, v, documents, window=None, **more):
        if fault == "causal":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return plain(
            q, k, v, None if fault == "documents" else documents, None if fault == "window" else window, **more
        )

    if fault == "first_place":
        monkeypatch.setattr("plait_transformers.called.first_place", lambda model: 0)
    monkeypatch.setattr(attention.InnerBothWays, "forward", staticmethod(broken))
    monkeypatch.setattr(proof, "_facts", proof._facts.__wrapped__)  # without what other tests have found
    if fault == "first_place":
        with pytest.raises(Exception, match="cannot train roberta"):
            built("roberta")
        return
    facts = built("modernbert").facts
    assert (facts.how == attention.NAME) == (fault == "documents")
    assert facts.why_no_documents or fault != "documents"


EXACT = {
    "fsdp2": ({"fsdp2": {}}, 2),
    "tensor ranks": ({"tensor_parallel": {"degree": 2}}, 2),
    "ddp": ({"ddp": {}}, 2),
    "simplefsdp": ({"simplefsdp": {}}, 2),
    "zero": ({"zero": {}}, 2),
    "tensor ranks beside fsdp2": ({"tensor_parallel": {"degree": 2}, "fsdp2": {}}, 4),
}
QUICK = {("bert", "fsdp2")}
PAIRS = [(kind, under) for kind in KINDS for under in EXACT]


@pytest.mark.parametrize(
    ("kind", "under"), [pair if pair in QUICK else pytest.param(*pair, marks=SLOW) for pair in PAIRS]
)
def test_gradients_of_packed_documents(kind, under, plait_ranks):
    strategies, world = EXACT[under]
    check(plait_ranks, kind, strategies, world, documents=True)


@pytest.mark.parametrize("kind", [kind if kind == "bert" else pytest.param(kind, marks=SLOW) for kind in KINDS])
def test_files_are_read_and_written(kind, tmp_path):
    theirs = saved(tmp_path / "theirs", kind)
    model, ours = read(tmp_path / "theirs")
    export(ours, tmp_path / "ours", is_writer=True, parts=model.weight_parts())
    there, here = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert {name for name in there if not torch.equal(there[name], here[name])} == set()
    assert here.keys() == there.keys() == theirs.state_dict().keys() & there.keys()


@SLOW
def test_runs_of_an_encoder(folder, tmp_path, monkeypatch, capsys):
    """Of one rank: bitwise the same if it is resumed; on two, the same; what it leaves is for AutoModelForMaskedLM."""
    from transformers import AutoModelForMaskedLM

    monkeypatch.chdir(tmp_path)
    train = functools.partial(run, "train")
    one = ("strategy=[]", "checkpoint.interval=3")
    assert train(overrides(folder, "whole", *one)) == 0
    assert train(overrides(folder, "halves", *one, "train.steps=3")) == 0
    assert train(overrides(folder, "halves", *one)) == 0
    assert rows("whole") == rows("halves")
    found, wanted = (load_file(f"runs/{name}/export/model.safetensors") for name in ("halves", "whole"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    theirs = AutoModelForMaskedLM.from_pretrained("runs/whole/export").eval()
    state = theirs.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    capsys.readouterr()
    assert run("eval", ["whole", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(rows("whole")[6][1], rel=1e-6)
    assert run("data", [*overrides(folder, "whole"), "data.replaced=[1, 0, 0]", "rows=1"]) == 0
    assert "[MASK]{+" in capsys.readouterr().out.replace("[MASK] {+", "[MASK]{+")
    with raises_about("RUN"):
        run("sample", ["whole", "2 times"])


def test_labels_that_do_not_fit_the_model_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ("data=text", f"data.path={folder / 'text.jsonl'}")
    with raises_about("data", "Text", "data=masked"):
        run("train", [one for one in overrides(folder, "a") if not one.startswith("data")] + [*text, "strategy=[]"])
    masked = [one for one in overrides(folder, "a") if not one.startswith("model")]
    with raises_about("data", "Masked", "data=text"):
        run("train", [*masked, f"data.tokenizer={folder}", "strategy=[]"])


@SLOW
@pytest.mark.parametrize("strategy", ["[fsdp2]", "[tensor_parallel,fsdp2]", "[zero]"])
def test_runs_on_other_ranks_agree(strategy, folder, tmp_path, monkeypatch):
    """Begun on one rank and resumed on 2 or 4: the same tokens are hidden."""
    monkeypatch.chdir(tmp_path)
    assert run("train", overrides(folder, "one", "strategy=[]")) == 0
    assert run("train", overrides(folder, "more", "strategy=[]", "train.steps=3", "checkpoint.interval=3")) == 0
    ranks = 4 if "tensor" in strategy else 2
    assert run("train", overrides(folder, "more", f"strategy={strategy}", f"launch.nproc_per_node={ranks}")) == 0
    for step, (loss, held) in rows("one").items():
        assert rows("more")[step][0] == pytest.approx(loss, rel=1e-5)
        assert (held is None) or rows("more")[step][1] == pytest.approx(held, rel=1e-5)
