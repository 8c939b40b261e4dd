"""Conversations, and a folder with a tokenizer and a chat template for them."""

import itertools
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from plait.contract.batch import Batch

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 400


def conversation(number: int) -> list[dict[str, str]]:
    """One to three questions with answers, of unequal length, no two alike."""
    turns = []
    for turn in range(1 + number % 3):
        asked, answered = f"{number} times {turn}", "sure " * (number * 7 % 11)
        turns.append({"role": "user", "content": f"what is {asked}? ü " + "please " * (number % 5)})
        turns.append({"role": "assistant", "content": f"{asked} is {number * turn}. {answered}"})
    return turns


CHATS = [conversation(number) for number in range(60)]


def tokenizer_in(folder: Path, chats: list[list[dict[str, str]]] = CHATS, vocab: int = VOCAB) -> Path:
    """Save a tokenizer of `vocab` tokens that was trained on `chats`, with a template, in `folder`."""
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet)
    inner.train_from_iterator((m["content"] for chat in chats for m in chat), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def written(path: Path, chats: list[list[dict[str, str]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def pieces(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of each conversation in a batch, without what fills up."""
    found = []
    for tokens, labels, positions in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
        for begin, end in itertools.pairwise(starts):
            if (labels[begin:end] >= 0).any():
                found.append((tokens[begin:end], labels[begin:end]))
    return found
