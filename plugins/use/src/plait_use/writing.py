"""What the ranks of `plait sample` do: they write on from prompts, and rank 0 prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from plait import Config, PlaitError
from plait.host import build_source, load_model
from plait_use.next_token import Draw, NextToken

MORE = "\\"  # at the end of a typed line: the prompt goes on in the next line
HALF = "\N{REPLACEMENT CHARACTER}"  # of a character whose other bytes are still to come


class Prompts:
    """Texts as tokens, with room to write on. source: of the run's data, with its tokenizer. longest: tokens of a text.
    chat: each text is a message of the user, after those before it and their answers."""

    def __init__(self, source: Any, longest: int, chat: bool) -> None:
        self._source, self._longest, self._chat = source, longest, chat
        self.messages: list[dict[str, Any]] = []

    def ids(self, text: str) -> list[int]:
        """The oldest messages of a full conversation are dropped, in pairs, and rank 0 says so. Raises PlaitError for a
        text that alone leaves no room, and for a source that has no words for it."""
        method = "prompted" if self._chat else "encoded"
        if not hasattr(self._source, method):
            raise PlaitError(f"data of {type(self._source).__name__} has no {method!r}: it has no words for a prompt")
        new, dropped = {"role": "user", "content": text}, 0
        ids: list[int] = self._source.prompted([*self.messages, new]) if self._chat else self._source.encoded(text)
        while len(ids) >= self._longest and dropped < len(self.messages):
            dropped += 2  # a message and its answer
            ids = self._source.prompted([*self.messages[dropped:], new])
        if not ids:
            raise PlaitError(
                "an empty prompt: this tokenizer begins no text with a token, so give at least a character"
            )
        if len(ids) >= self._longest:
            raise PlaitError(
                f"the prompt has {len(ids):,} tokens, and train.seq_len={self._longest} leaves no room for more: "
                "shorten it, or raise train.seq_len"
            ).at("train.seq_len", self._longest, fits=f"at least {len(ids) + 1}")
        if dropped:
            self.messages = self.messages[dropped:]
            if dist.get_rank() == 0:
                print(f"(the oldest {dropped} messages are dropped: train.seq_len={self._longest} is full)", flush=True)
        return ids

    def answered(self, text: str, answer: str) -> None:
        """The next text is said after this one and its answer, if it is a chat."""
        if self._chat:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def write(
    config: Config,
    checkpoint: str | None,
    texts: Sequence[str] | None,
    chat: bool,
    tokens: int,
    draw: Mapping[str, Any],
) -> list[list[int]]:
    """Write on from each of `texts`, or from what is typed if that is None, at most so many `tokens`. Called by all
    ranks; rank 0 prints. Returns the new tokens of each text."""
    applied, source = load_model(config, checkpoint), build_source(config.data)
    prompts = Prompts(source, config.train.seq_len, chat)
    next_token = NextToken(applied, config.train.seq_len, source.vocabulary)
    ends = frozenset(source.special_ids()[0]) if hasattr(source, "special_ids") else frozenset()
    written = []
    for number, text in enumerate(_typed(prompts) if texts is None else texts):
        ids = prompts.ids(text)
        shown = Shown(source, ids, text if texts is not None and not chat else "")
        room = min(tokens, config.train.seq_len - len(ids))
        new: list[int] = []
        while len(new) < room and not (new and new[-1] in ends):
            new.append(next_token([*ids, *new], Draw(**draw), number, len(new)))
            shown.add(() if new[-1] in ends else new[-1:])
        shown.end()
        prompts.answered(text, shown.text)
        written.append(new)
    return written


class Shown:
    """Prints a text on rank 0 as its tokens come. text: what was written so far, without the prompt."""

    def __init__(self, source: Any, ids: Sequence[int], begin: str) -> None:
        self._source, self._ids, self._speaks = source, list(ids), dist.get_rank() == 0
        self._prompt, self.text = str(source.decoded(self._ids)), ""
        self._print(begin)

    def add(self, ids: Sequence[int]) -> None:
        self._ids += ids
        text = str(self._source.decoded(self._ids)).removeprefix(self._prompt)
        self._go_on(text.rstrip(HALF))

    def end(self) -> None:
        self._go_on(str(self._source.decoded(self._ids)).removeprefix(self._prompt))
        self._print("\n")

    def _go_on(self, text: str) -> None:
        if text.startswith(self.text):
            self._print(text.removeprefix(self.text))
            self.text = text

    def _print(self, text: str) -> None:
        if self._speaks:
            print(text, end="", flush=True)


def _typed(prompts: Prompts) -> Iterator[str]:
    """The prompts that are typed at the terminal of rank 0, on all ranks, until it ends them."""
    if dist.get_rank() == 0:
        print(f"Type a prompt; a line that ends with {MORE} goes on in the next; Ctrl-D ends.", flush=True)
    while True:
        told: list[str | None] = [_line(prompts) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told)
        if told[0] is None:
            return
        yield told[0]


def _line(prompts: Prompts) -> str | None:
    """A prompt that has room; None at the end."""
    while True:
        lines: list[str] = []
        while not lines or lines[-1].endswith(MORE):
            try:
                print("> " if not lines else ". ", end="", flush=True)
                lines.append(input())
            except EOFError:
                print(flush=True)
                return None
        text = "\n".join(line.removesuffix(MORE) for line in lines)
        try:
            prompts.ids(text)
        except PlaitError as error:
            print(error, flush=True)
        else:
            return text
