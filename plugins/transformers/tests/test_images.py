"""Images in conversations: tokens of their own, with the features of a frozen tower."""

import json
import shutil
from typing import Any

import attrs
import pytest
import torch
from families import OfFamily, apart, keys_of
from grid import BOUND, WHOLE_ROWS
from safetensors.torch import load_file, save_file
from test_language import KINDS, held, loaded, train
from torch.nn.functional import cross_entropy

from plait import IGNORE
from plait.host import check, compose
from plait.testing import raises_about
from plait.testing import train as tried
from plait_data.chat import Chat
from plait_testing.widened import Widened
from plait_transformers import images, language
from plait_transformers.build import decoder
from plait_transformers.images import write
from tests.helpers.chats import pieces, tokenizer_in

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARK{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB, NAMES = 400, ("a.png", "b.png", "deep/c.png")
EACH = ["llava", pytest.param("vipllava", marks=pytest.mark.slow)]


def asked(number: int) -> list[dict[str, Any]]:
    """One to two questions about one or two images each, with answers; each sixth of text alone."""
    messages = []
    for turn in range(1 + number % 2):
        shown = [{"type": "image", "image": NAMES[(number + i + turn) % 3]} for i in range(1 + number % 2)]
        parts = [{"type": "text", "text": f"{number}: what is it? {turn} "}, *shown, {"type": "text", "text": " say"}]
        messages.append({"role": "user", "content": f"no {number}" if number % 6 == 0 else parts})
        messages.append({"role": "assistant", "content": f"it is {'red ' * (number % 4)}{number}"})
    return messages


CHATS = [asked(number) for number in range(12)]


def drawn(folder):
    from PIL import Image, ImageDraw

    (folder / "deep").mkdir(parents=True)
    for number, (name, size) in enumerate(zip(NAMES, [(20, 16), (16, 16), (16, 24)], strict=True)):
        image = Image.new("RGB", size, (40 * number, 200 - 60 * number, 90))
        ImageDraw.Draw(image).ellipse((2, 2 + number, 12, 14), fill=(250, 20 * number, 10))
        image.save(folder / name)
    return folder


def llava(tokenizer, template):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    of_images = CLIPImageProcessorPil(size={"height": 16, "width": 16}, crop_size={"height": 16, "width": 16})
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(of_images, tokenizer, patch_size=8, chat_template=template, **more)


def gemma3(tokenizer, template):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    of_images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(of_images, tokenizer, image_seq_length=4, chat_template=template)


PROCESSORS: dict[str, Any] = {"llava": llava, "vipllava": llava, "gemma3": gemma3}
SPECIAL = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}


def model_in(folder, kind):
    """The folder of a small model of the family, with its processor."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

    mark = "<image>"
    tokenizer_in(folder, vocab=VOCAB - len(SPECIAL))
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=SPECIAL)
    template = TEMPLATE.replace("MARK", mark)
    tokenizer.chat_template = template
    processor = PROCESSORS[kind](tokenizer, template)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = {**keys_of("llama")}
    text |= {"model_type": kind + "_text", **keys_of(kind + "_text")} if kind == "gemma3" else {}
    text |= {"vocab_size": VOCAB, "max_position_embeddings": 256}
    rest = KINDS[kind if kind in KINDS else "llava"][1]
    given = {**rest, "model_type": kind, "text_config": text}
    given["image_token_index"] = given["image_token_id"] = tokenizer.convert_tokens_to_ids(mark)
    given |= {"vision_feature_layer": -1} if kind == "llava" else {}
    given |= {"vision_feature_layers": [-1, -2]} if kind == "vipllava" else {}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind].from_dict(given))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """kind -> (folder of the model, photos, folder for model.images, file of conversations); each made once."""
    known: dict[str, Any] = {}

    def of(kind):
        if kind not in known:
            where = tmp_path_factory.mktemp(kind)
            photos, folder = drawn(where / "photos"), model_in(where / "model", kind)
            write(str(folder), str(photos), str(where / "seen"), torch.float64)
            chats = where / "chats.jsonl"
            chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in CHATS))
            known[kind] = folder, photos, where / "seen", chats
        return known[kind]

    return of


def source(made, kind, **more):
    folder, _, seen, chats = made(kind)
    given = {"path": str(chats), "tokenizer": str(folder), "images": str(seen), "validation_fraction": 0}
    return Chat(**{**given, **more})


@pytest.mark.parametrize("kind", EACH)
def test_gradients_are_those_of_the_whole_model_that_sees_the_images(kind, made):
    """Of packed rows, against transformers' model on each conversation as its own processor makes it; in float64."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder, photos, seen, _ = made(kind)
    of_folder: Any = AutoModelForImageTextToText.from_pretrained
    theirs, processor = of_folder(folder, dtype=torch.float64).eval(), AutoProcessor.from_pretrained(folder)
    with torch.device("meta"):
        assert decoder(path=str(folder), images=str(seen)).images_from == str(seen)
    ours = loaded(folder, torch.float64, images=str(seen))
    batch = source(made, kind).open(seq_len=160, seed=1, global_batch_size=4, dp=(0, 1)).train(0)
    processed = []
    for chat in CHATS:
        names = [p["image"] for m in chat if isinstance(m["content"], list) for p in m["content"] if "image" in p]
        opened = [Image.open(photos / name).convert("RGB") for name in names]
        text = processor.apply_chat_template(chat, tokenize=False)
        given = processor(text=text, images=opened or None, add_special_tokens=False, return_tensors="pt")
        processed.append({n: x.double() if x.is_floating_point() else x for n, x in given.items()})
    compared = shown = 0
    with Widened():
        logits = ours(batch.tokens, batch.positions)
        flat, labels = logits.flatten(0, 1), batch.labels.flatten()
        cross_entropy(flat, labels, ignore_index=IGNORE, reduction="sum").backward()
        for tokens, wanted in pieces(batch):
            hard = tokens.where(tokens < VOCAB, processor.image_token_id)
            given = next(g for g in processed if g["input_ids"][0, : len(hard)].equal(hard))
            assert len(hard) == given["input_ids"].shape[1] - 1
            found = theirs(**given, use_cache=False).logits[0, :-1]
            cross_entropy(found, wanted, ignore_index=IGNORE, reduction="sum").backward()
            assert not (wanted == processor.image_token_id).any()
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


@attrs.frozen
class WithImages(OfFamily):
    """A trial on rows in which images stand."""

    folder: str = ""
    images: str = ""
    steps: int = 2

    def build(self):
        with torch.device("meta"):
            return decoder(path=self.folder, images=self.images, weights="init")

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(4, VOCAB, (8, 17), generator=generator)
        tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
        tokens[:, 3:7] = VOCAB + torch.arange(4)
        tokens[::2, 9:12] = VOCAB + 2 + torch.arange(3)
        labels[:, :6] = IGNORE
        return tokens, labels


def result(folder, seen, strategies):
    """Called on every rank."""
    return tried(WithImages(folder=folder, images=seen), strategies)


STRATEGIES = {
    "fsdp2": {"fsdp2": {}},
    "simplefsdp": {"simplefsdp": {}},
    **WHOLE_ROWS,
    "context_parallel": {"context_parallel": {"degree": 2}, "fsdp2": {}},
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", EACH)
def test_under_strategies(kind, strategy, made, plait_ranks):
    folder, _, seen, _ = made(kind)
    (one,) = plait_ranks.once(result, str(folder), str(seen), {}, world=1)
    for answer in plait_ranks.run(result, str(folder), str(seen), STRATEGIES[strategy], world=2):
        error, name = apart(answer, one)
        assert error < BOUND, name


def test_what_divides_the_sum_of_words_and_images_is_refused(made, plait_ranks):
    folder, _, seen, _ = made("llava")
    for strategies, said in {
        "tensor_parallel": "sequence_parallel=true: set strategy.tensor_parallel.sequence_parallel=false",
        "pipeline": "pipeline",
    }.items():
        with pytest.raises(Exception, match=said) as caught:
            plait_ranks.run(result, str(folder), str(seen), {strategies: {"degree": 2}}, world=2)
        assert "PlaitError" in str(caught.value)


def overrides(made, kind, run, *more):
    folder, _, seen, chats = made(kind)
    sizes = ("train.seq_len=96", "train.local_batch_size=1", "train.steps=4", "validation.interval=0")
    data = ("data=chat", f"data.path={chats}", "data.validation_fraction=0", f"run.name={run}")
    return ["model=transformers", f"model.path={folder}", f"model.images={seen}", *sizes, *data, *more]


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_its_export_is_the_whole_model(made, tmp_path):
    two = ("strategy=[fsdp2]", "launch.nproc_per_node=2")
    told = train(tmp_path, *overrides(made, "llava", "whole", *two))
    assert "the language part of llava trains, on text and images, whose features are frozen" in told
    train(tmp_path, *overrides(made, "llava", "again", *two, "train.steps=2"))
    train(tmp_path, *overrides(made, "llava", "again", *two))
    there, here = held(made("llava")[0]), held(tmp_path / "runs" / "whole" / "export")
    again = held(tmp_path / "runs" / "again" / "export")
    assert there.keys() == here.keys() == again.keys()
    assert all(torch.equal(again[name], here[name]) for name in here)
    assert {name for name in there if torch.equal(here[name], there[name])} == {
        name for name in there if "vision" in name or "projector" in name
    }


def test_features_that_are_not_what_the_model_sees_are_refused(made):
    """Such as those of a family whose images act by masks or positions of their own."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder, photos, _, _ = made("llava")
    of_folder: Any = AutoModelForImageTextToText.from_pretrained
    whole, processor = of_folder(folder).eval(), AutoProcessor.from_pretrained(folder)
    given = images._processed(processor, photos / "a.png", torch.float32)
    with torch.no_grad():
        features = images._features(whole, given)
        images._check(whole, given, features, processor.image_token_id, "F")
        with raises_about("model.images", "F", "a family whose images are tokens, such as llava"):
            images._check(whole, given, features.flip(0), processor.image_token_id, "F")


def test_words_beside_the_tokens_of_an_image_are_refused(made):
    from transformers import AutoProcessor

    folder, photos, _, _ = made("llava")
    processor = AutoProcessor.from_pretrained(folder)
    images._check_splits(processor, [processor.image_token_id], photos / "a.png")
    with raises_about("model.images", str(photos / "a.png"), "a processor such as llava's"):
        images._check_splits(processor, processor.tokenizer.encode("red"), photos / "a.png")


def test_a_family_that_gives_images_masks_of_their_own_is_refused(tmp_path):
    """Within an image of gemma3 tokens see later ones."""
    folder = model_in(tmp_path / "model", "gemma3")
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
