"""Conversations to fine-tune on: JSON lines, of which the model learns the answers."""

import hashlib
import math
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from plait import PlaitError, misfit
from plait_data import conversations
from plait_data.at_path import AtPath
from plait_data.cached import silent
from plait_data.documents import File
from plait_data.images import images_of
from plait_data.left_out import some
from plait_data.template import Template, template_of
from plait_data.text_source import Say

BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",  # the two name the tokens that stop an answer
    "generation_config.json",
)


@attrs.define(kw_only=True, slots=False)
class Chat(AtPath):
    """JSON lines, each an object with a conversation in one of the forms of `row_formats`; `tools` beside it, if any.

    tokenizer: a folder with a `tokenizer.json` and a chat template; "auto": the model's, which the core fills in.
    messages_key: the key that holds the messages; None: the keys of each row tell.
    template: a file with a chat template; None: that of the tokenizer's folder.
    images: a folder with the tokens of images; None: no image; "auto": the model's, which the core fills in.
    """

    tokenizer: str = "auto"
    attention: str = attrs.field(init=False, default="document")
    bod_token: str | None = attrs.field(init=False, default=None)  # the template writes what begins a conversation
    messages_key: str | None = None
    template: str | None = None
    images: str | None = None

    def files(self) -> list[File]:
        files = super().files()
        wrong = [file for file in files if file.kind != "lines"]
        if wrong and (len(wrong) == len(files) or wrong[0].named):
            raise misfit("data.path", self.path, "JSON lines (.jsonl, .json or .ndjson), one conversation a line")
        if wrong:
            line = f"left out {len(wrong)} file(s) that are not JSON lines: {some([file.path.name for file in wrong])}"
            self._left_out = "; ".join(filter(None, (self._left_out, line)))
        return [file for file in files if file.kind == "lines"]

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        first = self.files()[0]  # before the tokenizer, which may be the model's, known only when that is built
        folder = Path(self.tokenizer).expanduser()
        if not folder.is_dir():
            raise misfit("data.tokenizer", self.tokenizer, "a folder with tokenizer.json and a chat template")
        super().check(seq_len=seq_len, vocab_size=vocab_size)
        if find_spec("transformers") is None:
            raise PlaitError(
                f"data={type(self).__name__.lower()} needs the library transformers: pip install 'plait-data[chat]'"
            ).at("data", type(self).__name__.lower())
        images_of(self.images)
        self.check_rows(first)  # the others are read in `prepare`
        self._template  # noqa: B018 (raises)

    def check_rows(self, file: File) -> None:
        """Raises PlaitError if the first row of `file` cannot be read."""
        next(conversations.conversations(file, self.messages_key), None)

    @cached_property
    def _template(self) -> str:
        return template_of(Path(self.tokenizer).expanduser(), self.template)

    def write(self, files: list[File], folder: Path, say: Say) -> None:
        template = Template(Path(self.tokenizer).expanduser(), self._template, images_of(self.images))
        conversations.write(files, self.messages_key, template, folder, say)

    def is_complete(self, folder: Path) -> bool:
        return conversations.read_meta(folder) is not None

    def key(self, files: list[File]) -> tuple[Any, ...]:
        template = hashlib.sha256(self._template.encode()).hexdigest()
        fraction = self.held_out
        by = self.encoder.version, version("transformers"), version("jinja2"), *self._beside()
        images = images_of(self.images)
        seen = () if images is None else (images.digest,)
        return "chat", conversations.FORMAT, self.encoder.digest, template, self.messages_key, fraction, by, *seen

    def _beside(self) -> list[str]:
        """Digests of the other files from which transformers takes tokens, and names for the template."""
        files = [Path(self.tokenizer).expanduser() / name for name in BESIDE]
        return [hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "" for file in files]

    def special_ids(self) -> tuple[list[int], int | None]:
        """Also the id of the special token with which the template ends an answer, if it writes one."""
        ends, begin = super().special_ids()
        try:
            template = Template(Path(self.tokenizer).expanduser(), self._template)
        except PlaitError:  # the folder is gone since the conversations were encoded
            return ends, begin
        return ends + template.ends_of_answers(self.encoder.special.special), begin  # type: ignore[attr-defined]

    def check_length(self, *, seq_len: int) -> None:
        self.of_sets(lambda each: each.check_length(seq_len=seq_len))
        tokens = conversations.read(self.folder)
        held, answered = self._held(tokens.keys), tokens.answers <= seq_len
        if held.all():
            raise PlaitError(
                f"data has {len(held)} different conversations, of which data.validation_fraction="
                f"{self.validation_fraction:g} holds out all: take more, or data.validation_fraction=0"
            ).at("data.validation_fraction", self.validation_fraction, fits="0")
        for name, part in {"to train on": ~held, "held out for validation": held}.items():
            if part.any() and not (part & answered).any():
                least = int(tokens.answers[part].min())
                raise PlaitError(
                    f"of the conversations {name} no answer begins within train.seq_len={seq_len} tokens; "
                    f"the first does with train.seq_len={least}"
                ).at("train.seq_len", seq_len, fits=f"at least {least}")

    def shortened(self, *, seq_len: int) -> str:
        """After `check_length`: what of the data no sample holds because it is too long, in words; "" if nothing."""
        tokens = conversations.read(self.folder)
        lengths = tokens.lengths.astype(np.int64)
        out = tokens.answers > seq_len
        cut = ~out & (lengths > seq_len + 1)
        if not (out.any() or cut.any()):
            return ""
        lost = int(lengths[out].sum() + (lengths[cut] - seq_len - 1).sum())
        return (
            f"train.seq_len={seq_len} is too short for some of {len(lengths):,} conversations: {int(out.sum()):,} left "
            f"out, as no answer begins in time, and {int(cut.sum()):,} cut; {lost:,} of {int(lengths.sum()):,} tokens "
            f"are lost; the longest needs train.seq_len={int(lengths.max()) - 1}"
        )

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> Any:
        from plait_data.bins import Bins

        self.prepare(silent)  # the parent has done it, unless the cache was removed since
        self.check_length(seq_len=seq_len)
        tokens = conversations.read(self.folder)
        held, pad = self._held(tokens.keys), self.encoder.eod
        return self.beside(Bins(tokens, held, pad, seq_len, seed, global_batch_size, dp), seed)

    def _held(self, keys: np.ndarray) -> np.ndarray:
        """Which conversations (n,) are held out: those with the smallest digests, equal ones on one side."""
        count = math.ceil(self.held_out * len(keys))
        return keys <= np.partition(keys, count - 1)[count - 1] if count else np.zeros(len(keys), bool)
