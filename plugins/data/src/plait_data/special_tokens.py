"""The special tokens of a tokenizer, as its own files name them: what begins and ends a text, and what ends an answer.

A folder says so in several places. They are asked in this order, which is that of transformers:

1. `tokenizer_config.json`; over it `special_tokens_map.json`, unless the first lists its tokens by id (newer folders)
2. the token that the tokenizer itself writes after a text
3. the ids in `config.json`, then those in `generation_config.json`, if they name one added token
4. a usual name, if exactly one special token of `tokenizer.json` has one

What none of them says is not guessed.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from plait import PlaitError, near_miss

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What tokenizers call the end of a text.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<eod>")


@attrs.frozen
class SpecialTokens:
    """eos: the id that ends a text; None: the files do not say. eos_from: the file that says so.

    bos: the id that the files call the beginning of a text, or None. begins: the ids that the tokenizer writes before
    each text; it may write none although there is a bos. stops: the ids that end an answer, eos among them.
    special: every token that the files call special, as it is written. said: what the files say of an end that could
    not be taken, in words. mask: the token that hides others, as they call it.
    """

    eos: int | None
    eos_from: str
    bos: int | None
    begins: tuple[int, ...]
    stops: frozenset[int]
    special: frozenset[str]
    said: str
    mask: str | None = None

    def eod(self, tokenizer: str, vocab: dict[str, int], given: str | None) -> int:
        """The id that ends a document: that of the token `given`, or else eos. Raises PlaitError if there is none."""
        if given is not None:
            return token_id("data.eod_token", given, tokenizer, vocab)
        if self.eos is not None:
            return self.eos
        raise PlaitError(
            f"data.tokenizer={tokenizer} does not say which token ends a text ({self.said}): set data.eod_token"
        ).at("data.eod_token", fits="a token of the tokenizer")


def token_id(key: str, token: str, tokenizer: str, vocab: dict[str, int]) -> int:
    """The id of the token that the option `key` names. Raises PlaitError if there is no such token."""
    if token in vocab:
        return vocab[token]
    raise PlaitError(
        f"{key}={token!r} is not among the {len(vocab)} tokens of data.tokenizer={tokenizer}"
        f"{near_miss(token, [known for known in vocab if known[:1] in '<['])}"
    ).at(key, token, fits="a token of the tokenizer")


def special_tokens(file: Path, inner: "Tokenizer") -> SpecialTokens:
    """Those of the tokenizer `inner`, read from `file`; the files beside it count if its name is `tokenizer.json`.

    Raises PlaitError for a file beside it that is not JSON.
    """
    files = _Files(file)
    vocab = inner.get_vocab(with_added_tokens=True)
    by_id = {number: token for token, number in vocab.items()}
    added = inner.get_added_tokens_decoder()
    flagged = {token.content for token in added.values() if token.special}
    special = frozenset(flagged | files.special)
    begins, after = _around(inner)

    def known(numbers: Iterable[int]) -> list[int]:  # a family's defaults may be the ids of ordinary tokens
        return [number for number in dict.fromkeys(numbers) if number in added or by_id.get(number) in special]

    eos, eos_from, said = _eos(files, vocab, by_id, known, after, flagged)
    stops = known(files.numbers("generation_config.json", "eos_token_id")) or known(
        files.numbers("config.json", "eos_token_id")
    )
    bos = vocab.get(files.names.get("bos_token", ""))
    if bos is None and "bos_token" not in files.names:
        bos = next(iter(known(files.numbers("config.json", "bos_token_id"))), None)
    if not begins and files.adds_bos and bos is not None:
        begins = (bos,)
    return SpecialTokens(
        eos=eos,
        eos_from=eos_from,
        bos=bos,
        begins=begins,
        stops=frozenset(stops) | ({eos} if eos is not None else set()),
        special=special | {by_id[number] for number in (*begins, *stops, eos) if number in by_id},
        said=said,
        mask=files.names.get("mask_token"),
    )


def _eos(
    files: "_Files",
    vocab: dict[str, int],
    by_id: dict[int, str],
    known: Callable[[Iterable[int]], list[int]],
    after: tuple[int, ...],
    flagged: set[str],
) -> tuple[int | None, str, str]:
    """(the id, the file that says so, "") or (None, "", what the files say)."""
    name = files.names.get("eos_token")
    if name is not None:
        if name in vocab:
            return vocab[name], files.origin["eos_token"], ""
        return None, "", f"{files.origin['eos_token']} calls it {name!r}, which is not among its tokens"
    if len(after) == 1:
        return after[0], "tokenizer.json", ""
    for source in ("config.json", "generation_config.json"):
        numbers = known(files.numbers(source, "eos_token_id"))
        usual = [number for number in numbers if by_id[number] in ENDS]
        for found in (numbers, usual):
            if len(found) == 1:
                return found[0], source, ""
        if numbers:
            return None, "", f"{source} lists {', '.join(by_id[number] for number in numbers)}"
    usual_names = sorted(flagged.intersection(ENDS), key=lambda token: vocab[token])
    if len(usual_names) == 1:
        return vocab[usual_names[0]], "tokenizer.json", ""
    shown = usual_names or sorted(flagged, key=lambda token: vocab[token])
    some = ", ".join(shown[:8]) + ", ..." * (len(shown) > 8)
    return None, "", f"its special tokens: {some}" if shown else "none of its tokens is marked as special"


def _around(inner: "Tokenizer") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer writes before each text, and those after it."""
    from tokenizers import Tokenizer, models

    probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # whatever the vocabulary, "a" is one token
    processor = inner.post_processor
    if processor is None:
        return (), ()
    probe.post_processor = processor
    encoded = probe.encode("a")
    at = encoded.sequence_ids.index(0)
    return tuple(encoded.ids[:at]), tuple(encoded.ids[at + 1 :])


class _Files:
    """What the JSON files beside a tokenizer's say of its tokens.

    names: "eos_token" and the like -> the token. origin: the same keys -> the file. special: all that are called
    special. adds_bos: whether the tokenizer is to write its bos.
    """

    def __init__(self, file: Path) -> None:
        self._folder = file.parent if file.name == "tokenizer.json" else None
        self._read: dict[str, dict[str, Any]] = {}
        self.names: dict[str, str] = {}
        self.origin: dict[str, str] = {}
        self.special: set[str] = set()
        config = self._json("tokenizer_config.json")
        self._take(config, "tokenizer_config.json")
        by_id = config.get("added_tokens_decoder")
        if isinstance(by_id, dict):
            self.special |= {_text(one) or "" for one in by_id.values() if isinstance(one, dict) and one.get("special")}
        else:
            self._take(self._json("special_tokens_map.json"), "special_tokens_map.json")
        self.special.discard("")
        self.adds_bos = config.get("add_bos_token") is True

    def numbers(self, name: str, key: str) -> list[int]:
        """The ids at `key` of the file `name`, or of the part of it that describes the language model."""
        content = self._json(name)
        value = content.get(key)
        for part in ("text_config", "llm_config", "language_config"):
            if value is None and isinstance(content.get(part), dict):
                value = content[part].get(key)
        return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]

    def _take(self, config: dict[str, Any], name: str) -> None:
        for key, value in config.items():
            many = value.values() if isinstance(value, dict) and "content" not in value else value
            if key.endswith("_token") and (token := _text(value)):
                self.names[key], self.origin[key] = token, name
                self.special.add(token)
            elif key in ("additional_special_tokens", "extra_special_tokens") and not isinstance(value, str):
                self.special |= {_text(one) or "" for one in many or ()}

    def _json(self, name: str) -> dict[str, Any]:
        if self._folder is None or not (path := self._folder / name).is_file():
            return {}
        if name not in self._read:
            try:
                content = json.loads(path.read_bytes().decode("utf-8-sig"))
            except (OSError, ValueError, RecursionError) as error:
                reason = str(error).splitlines()[0]
                raise PlaitError(f"data.tokenizer: {path} cannot be read as JSON: {reason}").at(
                    "data.tokenizer", str(path), fits="a folder whose files are JSON"
                ) from error
            self._read[name] = content if isinstance(content, dict) else {}
        return self._read[name]


def _text(value: Any) -> str | None:
    """A token as files write it: a string, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None
