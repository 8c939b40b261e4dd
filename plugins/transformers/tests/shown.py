"""Small models that take images, with their processors; images, and conversations about these."""

from typing import Any

import pytest
import torch
from families import keys_of
from test_language import KINDS

from plait_transformers.processed import without_videos
from tests.helpers.chats import tokenizer_in

SLOW = pytest.mark.slow
EACH = [
    "qwen3_5",
    *(pytest.param(kind, marks=SLOW) for kind in ("gemma3", "qwen3_vl", "mistral3", "llava", "vipllava")),
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARK{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB, NAMES = 400, ("a.png", "b.png", "deep/c.png")


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


def qwen(tokenizer, template):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    of_images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)
    return without_videos(Qwen3VLProcessor)(of_images, tokenizer, chat_template=template)


def mistral(tokenizer, template):
    """Its images as pixtral's processor, which needs torchvision, makes them, but of one size, and without the tokens
    at the ends of lines."""
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    sizes = {"size": {"longest_edge": 32}, "crop_size": {"height": 16, "width": 16}, "do_center_crop": True}
    of_images = PixtralImageProcessorPil(**sizes, patch_size={"height": 8, "width": 8})
    more = {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    return LlavaProcessor(of_images, tokenizer, patch_size=8, chat_template=template, **more)


PROCESSORS: dict[str, Any] = {"llava": llava, "vipllava": llava, "gemma3": gemma3, "mistral3": mistral}
PROCESSORS |= {"qwen3_5": qwen, "qwen3_vl": qwen}
SPECIAL = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}
MARKS = {"gemma3": "<begin>", "qwen3_5": "<begin><image><end>", "qwen3_vl": "<begin><image><end>"}
TURNS = {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0, "rope_theta": 100.0}
PARTS: dict[str, Any] = {"qwen3_vl": {"rope_parameters": TURNS}}
PARTS["qwen3_5"] = PARTS["qwen3_vl"] | {"layer_types": ["linear_attention", "full_attention"]}


def model_in(folder, kind):
    """The folder of a small model of the family, with its processor."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

    mark = MARKS.get(kind, "<image>")
    tokenizer_in(folder, vocab=VOCAB - len(SPECIAL))
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=SPECIAL)
    template = TEMPLATE.replace("MARK", mark)
    tokenizer.chat_template = template
    processor = PROCESSORS[kind](tokenizer, template)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if "qwen" in kind:  # which needs torchvision
        (folder / "video_preprocessor_config.json").write_text('{"video_processor_type": "Qwen3VLVideoProcessor"}')
    of = {"mistral3": "mistral", "gemma3": "gemma3_text"}.get(kind, f"{kind}_text" if "qwen" in kind else "llama")
    text = {**keys_of(of), "model_type": of, **PARTS.get(kind, {})}
    text |= {"vocab_size": VOCAB, "max_position_embeddings": 256}
    rest = KINDS[kind if kind in KINDS else "llava"][1]
    given = {**rest, "model_type": kind, "text_config": text}
    given["image_token_index"] = given["image_token_id"] = tokenizer.convert_tokens_to_ids("<image>")
    given |= {"vision_feature_layer": -1} if kind == "llava" else {}
    given |= {"vision_feature_layers": [-1, -2]} if kind == "vipllava" else {}
    if kind not in ("llava", "vipllava", "gemma3"):
        width = {"out_hidden_size": 32} if "qwen" in kind else {"image_size": 32}
        given["vision_config"] = {**rest["vision_config"], "patch_size": 4, **width}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind].from_dict(given))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, 0.0, 0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)  # qwen3_5 has one that takes digits apart
    return folder
