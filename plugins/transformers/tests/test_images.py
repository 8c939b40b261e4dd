"""Images in conversations: tokens of their own, with the features of a frozen tower."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import BOUND
from safetensors.torch import load_file, save_file
from shown import CHATS, EACH, VOCAB, drawn, model_in
from test_language import held, loaded, train
from torch.nn.functional import cross_entropy

from plait import IGNORE
from plait.host import check, compose
from plait.ops import DocumentMask
from plait.testing import raises_about
from plait_data.chat import Chat
from plait_testing.widened import Widened
from plait_transformers import images, language
from plait_transformers.build import decoder
from plait_transformers.images import write
from plait_transformers.processed import as_text, processed, processor_of, with_text_behind
from plait_transformers.soft_tokens import Images
from tests.helpers.chats import pieces


def source(made, kind, **more):
    folder, _, seen, chats = made(kind)
    given = {"path": str(chats), "tokenizer": str(folder), "images": str(seen), "validation_fraction": 0}
    return Chat(**{**given, **more})


@pytest.mark.parametrize("kind", EACH)
def test_gradients_are_those_of_the_whole_model_that_sees_the_images(kind, made):
    compare(kind, made)


def compare(kind, made):
    """Of packed rows, against transformers' model on each conversation as its own processor makes it; in float64."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    folder, photos, seen, _ = made(kind)
    of_folder: Any = AutoModelForImageTextToText.from_pretrained
    theirs = of_folder(folder).double().eval()  # buffers of float32 then have the values that ours have
    processor, soft = processor_of(folder, theirs.config), theirs.config.image_token_id
    with torch.device("meta"):
        assert decoder(path=str(folder), images=str(seen)).images_from == str(seen)
    ours = loaded(folder, torch.float64, images=str(seen))
    batch = source(made, kind).open(seq_len=160, seed=1, global_batch_size=4, dp=(0, 1)).train(0)
    asked_of_it = []
    for chat in CHATS:
        names = [p["image"] for m in chat if isinstance(m["content"], list) for p in m["content"] if "image" in p]
        opened = [Image.open(photos / name).convert("RGB") for name in names]
        text = processor.apply_chat_template(chat, tokenize=False)
        given = processor(text=text, images=opened or None, add_special_tokens=False, return_tensors="pt")
        asked_of_it.append({n: x.double() if x.is_floating_point() else x for n, x in given.items()})
    compared = shown = 0
    with Widened():
        logits = ours(batch.tokens, batch.positions)
        flat, labels = logits.flatten(0, 1), batch.labels.flatten()
        cross_entropy(flat, labels, ignore_index=IGNORE, reduction="sum").backward()
        for tokens, wanted in pieces(batch):
            hard = tokens.where(tokens < VOCAB, soft)
            given = next(g for g in asked_of_it if g["input_ids"][0, : len(hard)].equal(hard))
            assert len(hard) == given["input_ids"].shape[1] - 1
            found = theirs(**given, use_cache=False).logits[0, :-1]
            cross_entropy(found, wanted, ignore_index=IGNORE, reduction="sum").backward()
            assert not (wanted == soft).any()
            assert (wanted < VOCAB).all()
            compared, shown = compared + 1, shown + int((tokens >= VOCAB).sum())
    assert compared >= 4
    assert shown >= 16
    modules, found = language.names_in_whole(theirs, ours), dict(ours.named_parameters())
    whole = sum(float(p.grad.square().sum()) for p in found.values()) ** 0.5
    checked = set()
    for fqn, param in theirs.named_parameters():
        own = language.in_part(fqn, modules)
        if own in found:
            checked.add(own)
            error = float((found[own].grad - param.grad).norm()) / max(float(param.grad.norm()), 1e-3 * whole)
            assert error < BOUND, (fqn, error)
    assert checked == found.keys()


def test_positions_and_masks_of_packed_images():
    """An image of 2 x 2 tokens, one of 1 x 2, and text: two documents, in the second the images meet."""
    size, tables = 10, {"steps": torch.tensor([0, 0, 0, 2, 0, 2])}
    tables["places"] = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [0, 0], [0, 1]])
    ids = torch.tensor([[1, 10, 11, 12, 13, 2, 3, 14, 15, 14, 15, 4]])
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])
    found = Images(size, {"axes": 2}, tables).positions(ids, places)
    assert found[0].equal(places[0:1])
    assert found[1:, 0].tolist() == [[0, 1, 1, 2, 2, 3, 0, 1, 1, 3, 3, 5], [0, 1, 2, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    images = Images(size, {"both_ways": True}, tables)
    ids[0, 5:7] = torch.tensor([14, 15])  # an image ends a document, and another begins the next
    causal = DocumentMask()(places)
    opened = images.opened(causal, ids, places)[0, 0]
    wanted = causal[0, 0].clone()
    wanted[1:6, 1:6] = wanted[6:11, 6:11] = True
    assert opened.equal(wanted)
    added = images.opened(DocumentMask()(places, torch.float64), ids, places)[0, 0]
    assert (added == 0).equal(wanted)


def test_an_image_without_text_of_its_own_is_refused(made):
    """A run of its tokens counts as one in the text; what the tokenizer does not make of the text is refused."""
    processor = processor_of(str(made("gemma3")[0]), None)
    known = processor.tokenizer.get_vocab()
    soft, end = known["<image>"], known["<end>"]
    text, runs = as_text(processor, torch.tensor([soft, soft, end, soft]), soft, Path("F"))
    assert (text, runs) == ("<image><end><image>", [2, 1])
    with raises_about("model.images", "F", "a processor such as llava's"):
        as_text(processor, torch.tensor([known["r"], known["e"], known["d"]]), soft, Path("F"))


def without_restart(images, ids, places):
    return POSITIONS(images, ids, torch.arange(places.shape[1]).expand_as(places))


def without_images(images, ids, places):
    return places.expand(1 + images.axes, *places.shape) if images.axes else places


def other_rows(images, name, ids, others):
    return OF_TOKENS(images, name, ids.where(ids < VOCAB, ids ^ 1), others)


def across_images(images, mask, ids, places):
    soft = ids >= VOCAB
    return mask | (soft[:, :, None] & soft[:, None, :])[:, None]


POSITIONS, OF_TOKENS = Images.positions, Images._of_tokens
PLANTED = {
    "positions go on in the next document": ("qwen3_5", "positions", without_restart),
    "positions are those of text": ("qwen3_5", "positions", without_images),
    "a token has the next one's row": ("gemma3", "_of_tokens", other_rows),
    "a token has the next one's row and place": ("qwen3_5", "_of_tokens", other_rows),
    "nothing is added to later layers": ("qwen3_vl", "added", lambda images, ids, like: {}),
    "no token of an image sees later ones": ("gemma3", "opened", lambda images, mask, ids, places: mask),
    "images see each other": ("gemma3", "opened", across_images),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug, made, monkeypatch):
    kind, name, wrong = PLANTED[bug]
    made(kind)
    monkeypatch.setattr(Images, name, wrong)
    with pytest.raises(AssertionError):
        compare(kind, made)


def overrides(made, kind, run, *more):
    folder, _, seen, chats = made(kind)
    sizes = ("train.seq_len=96", "train.local_batch_size=1", "train.steps=4", "validation.interval=0")
    data = ("data=chat", f"data.path={chats}", "data.validation_fraction=0", f"run.name={run}")
    return ["model=transformers", f"model.path={folder}", f"model.images={seen}", *sizes, *data, *more]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen3_5"])
def test_a_run_resumes_bitwise_and_its_export_is_the_whole_model(kind, made, tmp_path):
    two = ("strategy=[fsdp2]", "launch.nproc_per_node=2")
    told = train(tmp_path, *overrides(made, kind, "whole", *two))
    assert f"the language part of {kind} trains, on text and images, whose features are frozen" in told
    train(tmp_path, *overrides(made, kind, "again", *two, "train.steps=2"))
    train(tmp_path, *overrides(made, kind, "again", *two))
    there, here = held(made(kind)[0]), held(tmp_path / "runs" / "whole" / "export")
    again = held(tmp_path / "runs" / "again" / "export")
    assert there.keys() == here.keys() == again.keys()
    assert all(torch.equal(again[name], here[name]) for name in here)
    assert {name for name in there if torch.equal(here[name], there[name])} == {
        name for name in there if any(word in name for word in ("vision", "visual", "projector"))
    }
    from transformers import AutoModelForImageTextToText

    of_folder: Any = AutoModelForImageTextToText.from_pretrained
    whole, said = of_folder(tmp_path / "runs" / "whole" / "export", output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert processor_of(str(tmp_path / "runs" / "whole" / "export"), whole.config).tokenizer is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", EACH)
def test_a_plan_counts_tokens_of_images_as_those_of_text(kind, made):
    from plait_plan import engine

    asked = overrides(made, kind, "planned", "strategy=[fsdp2]", "cluster=h100")
    text = [each for each in asked if not each.startswith(("model.images", "data"))]
    shown, plain = (engine.plan(compose(each), 2) for each in (asked, text))
    assert shown.memory.parameters == plain.memory.parameters
    assert shown.flops == pytest.approx(plain.flops, rel=0.02)
    assert plain.memory.peak <= shown.memory.peak <= 1.1 * plain.memory.peak


def seen_by(made, kind):
    """The whole model, the first image as its processor makes it, and what takes its place; all in float64."""
    from transformers import AutoModelForImageTextToText

    folder, photos, seen, _ = made(kind)
    of_folder: Any = AutoModelForImageTextToText.from_pretrained
    whole = of_folder(folder, dtype=torch.float64).eval()
    longer = with_text_behind(processed(processor_of(folder, whole.config), photos / "deep" / "c.png", torch.float64))
    index = json.loads((seen / "index.json").read_text())
    image = index["images"]["deep/c.png"]
    rows = slice(image["first"], image["first"] + sum(image["runs"]))
    return whole, longer, {name: table[rows] for name, table in load_file(seen / "features.safetensors").items()}, index


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_what_is_not_as_the_model_sees_it_is_refused(kind, made):
    """Rows in another order, masks and positions of text, and positions of another image."""
    whole, longer, own, index = seen_by(made, kind)
    token, acts = index["token"], index["acts"]
    ways = [{}, {"both_ways": True}, *([{"axes": 3}] if "axes" in acts else [])]
    ways += [acts] if "layers" in acts else []
    with torch.no_grad():
        assert images._that_act_so(whole, longer, own, token, ways, True) == [acts]
        for name, table in own.items():
            wrong = own | {name: table.flip(0) if name != "steps" else table + 1}
            assert images._that_act_so(whole, longer, wrong, token, ways, True) == [], name


def test_images_that_act_in_no_known_way_are_refused(tmp_path, monkeypatch):
    """As those of qwen3_vl, which also add to later layers, if that were not tried."""
    monkeypatch.setattr(images, "_ways", lambda own, part: [{}, {"both_ways": True}, {"axes": 3}])
    folder = model_in(tmp_path / "model", "qwen3_vl")
    with raises_about("model.images", str(folder), "a family whose images are tokens, such as llava"):
        write(str(folder), str(drawn(tmp_path / "photos")), str(tmp_path / "seen"))
    assert not (tmp_path / "seen").exists()


def test_other_features_are_other_data(made, tmp_path):
    """So a run does not resume on them."""
    seen = made("llava")[2]
    shutil.copytree(seen, tmp_path / "seen")
    index = json.loads((seen / "index.json").read_text())
    (tmp_path / "seen" / "index.json").write_text(json.dumps({**index, "features": "other"}))
    ours, theirs = source(made, "llava"), source(made, "llava", images=str(tmp_path / "seen"))
    for each in (ours, theirs):
        each.prepare(print)
    assert ours.fingerprint() != theirs.fingerprint()


def test_bad_input_is_one_sentence_before_ranks_start(made, tmp_path):
    folder, photos, seen, _ = made("llava")
    lost = [{"role": "user", "content": [{"type": "image", "image": "d.png"}]}, {"role": "assistant", "content": "a"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": lost}))
    with raises_about("data.images", "d.png"):
        source(made, "llava", path=str(tmp_path / "chats.jsonl")).prepare(print)
    with raises_about("data.images", None, "a folder made for model.images"):
        source(made, "llava", images=None).prepare(print)
    with raises_about("data.images", str(tmp_path), "a folder made for model.images"):
        source(made, "llava", images=str(tmp_path)).check(seq_len=96, vocab_size=VOCAB)
    with raises_about("model.images", str(photos), "a folder that this command wrote"):
        check(compose(overrides(made, "llava", "a", f"model.images={photos}")), 1)
    short = source(made, "llava")
    short.prepare(print)
    with raises_about("train.seq_len", 8):
        short.check_length(seq_len=8)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = load_file(other / "model.safetensors")
    name = next(one for one in weights if "projector" in one)
    save_file({**weights, name: weights[name] + 1}, other / "model.safetensors", {"format": "pt"})
    with raises_about("model.images", str(seen), "a folder made for model.path"):
        check(compose(overrides(made, "llava", "a", f"model.path={other}")), 1)
    with raises_about("model.images", str(seen)):
        check(compose(overrides(made, "llava", "a", "model.path=null", "model.config={model_type: llama}")), 1)
