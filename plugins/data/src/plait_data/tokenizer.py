"""From text to token ids: plain bytes, or a file of the library `tokenizers`."""

import hashlib
from array import array
from collections.abc import Sequence, Set
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from plait import PlaitError, near_miss
from plait_data.special_tokens import SpecialTokens, special_tokens, token_id

ENCODER = 2  # of how Plait calls the library and puts long texts together; another number uses another cache
NONE = "none"  # data.bod_token=none: documents begin with no token


class Tokenizer(Protocol):
    """size: ids are below it. eod: the id that ends a document. begins: the ids that begin one.

    digest: identifies all these and the tokenizer. version: of the code that encodes; "" if it cannot change.
    said: how documents begin and end, and by which file, in words; "" if the tokenizer has no other way.
    cheap: whether encoding takes no longer than handing the text to another process.
    """

    size: int
    eod: int
    begins: tuple[int, ...]
    digest: str
    version: str
    said: str
    cheap: bool

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """The ids of each UTF-8 text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special ones too."""

    def places(self, texts: list[str]) -> list[np.ndarray]:
        """Of each text, for each token [id, its first character, the character after its last] (n, 3).

        Only of tokenizers that are not cheap: the ids of cheap ones do not depend on what stands before and after.
        """


class Bytes:
    """Ids 0 to 255 are the bytes themselves, 256 ends a document."""

    size = 257
    eod = 256
    begins: tuple[int, ...] = ()
    digest = "bytes"
    version = ""
    said = ""
    cheap = True

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        parts = [
            "<end>" * len([*same]) if ends else bytes(same).decode("utf-8", "replace")
            for ends, same in groupby(ids, lambda number: number == self.eod)
        ]
        return "".join(parts)

    def places(self, texts: list[str]) -> list[np.ndarray]:
        raise NotImplementedError


class FromFile:
    """A `tokenizer.json`, with what the files beside it say of its special tokens.

    Special tokens spelt out in a text are encoded as plain characters. Other added tokens are part of the vocabulary,
    such as the tags of HTML in Gemma's.
    """

    cheap = False
    special: SpecialTokens

    def __init__(self, name: str, file: Path, eod_token: str | None, bod_token: str | None) -> None:
        from tokenizers import Tokenizer as Inner
        from tokenizers import __version__ as library

        try:
            content = file.read_bytes()
            self._inner = Inner.from_str(content.decode("utf-8-sig"))  # some editors write a byte order mark
        except Exception as error:  # the library raises nothing more specific
            reason = str(error).splitlines()[0]
            raise PlaitError(f"data.tokenizer={name}: {file} is not a file of the library tokenizers: {reason}").at(
                "data.tokenizer", name, fits="a file of the library tokenizers"
            ) from error
        # A file may contain truncation and padding settings of whoever saved it: either would garble documents.
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        self._encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        self.vocab = vocab = dict[str, int](self._inner.get_vocab(with_added_tokens=True))
        self.size = max(vocab.values(), default=-1) + 1  # ids may have gaps
        self.special = special_tokens(file, self._inner)
        self.eod = self.special.eod(name, vocab, eod_token)
        self.begins = _begins(name, self.special, vocab, self.eod, bod_token)
        plain = _never_from_text(self._inner, self.special.special | {eod_token, bod_token})
        parts = [self.eod, *([f"begins={self.begins}"] if self.begins else []), *([f"plain={plain}"] if plain else [])]
        self.digest = ":".join(map(str, (hashlib.sha256(content).hexdigest(), *parts)))
        self.version = f"tokenizers {library}, {ENCODER}"
        self.said = self._said(eod_token, bod_token)

    def _said(self, eod_token: str | None, bod_token: str | None) -> str:
        def names(ids: tuple[int, ...]) -> str:
            return " ".join(str(self._inner.id_to_token(number)) for number in ids) or "no token"

        end_by = self.special.eos_from if eod_token is None else "data.eod_token"
        begin_by = "the tokenizer's own way" if bod_token is None else "data.bod_token"
        if bod_token is None and self.eod in self.special.begins:
            begin_by = "the tokenizer would write the end"
        return f"a document begins with {names(self.begins)} ({begin_by}) and ends with {names((self.eod,))} ({end_by})"

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        encoded = self._encode([text.decode("utf-8", "replace") for text in texts], add_special_tokens=False)
        # np.array(one.ids) takes twice as long
        return [np.frombuffer(array("I", one.ids), np.uint32) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode([*ids], skip_special_tokens=False))

    def places(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._inner.encode_batch(texts, add_special_tokens=False)
        places = [[(number, *place) for number, place in zip(one.ids, one.offsets, strict=True)] for one in encoded]
        return [np.array(one, np.int64).reshape(-1, 3) for one in places]


def load(name: str, eod_token: str | None = None, bod_token: str | None = None) -> Tokenizer:
    """The tokenizer `name`: "bytes" or "auto", a file, a folder. Raises PlaitError for no tokenizer or no eod token."""
    if name in ("bytes", "auto"):
        for key, token in {"data.eod_token": eod_token, "data.bod_token": bod_token}.items():
            if token is not None and (key, token) != ("data.bod_token", NONE):
                raise PlaitError(
                    f"{key}={token!r} is for tokenizers read from a file; bytes end documents by id 256 and begin them "
                    "with no token"
                ).at(key, token, fits="null")
        return Bytes()
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.exists() and not (path.is_dir() or path.is_file()):  # reading a device or a pipe might never end
        raise PlaitError(f"data.tokenizer={name} is neither a file nor a folder, but a device, a pipe or a socket").at(
            "data.tokenizer", name, fits="'bytes', a file or a folder"
        )
    if not path.exists():
        raise PlaitError(
            f"data.tokenizer={name!r} is neither 'bytes' nor a file or folder{near_miss(str(name), ['bytes'])}"
        ).at("data.tokenizer", name, fits="'bytes', a file or a folder")
    if not file.is_file():
        raise PlaitError(
            f"data.tokenizer={name}: the folder holds no tokenizer.json; name another file or folder, or bytes"
        ).at("data.tokenizer", name, fits="a folder with tokenizer.json")
    return FromFile(name, file, eod_token, bod_token)


def _begins(
    name: str, special: SpecialTokens, vocab: dict[str, int], eod: int, bod_token: str | None
) -> tuple[int, ...]:
    if bod_token is None:
        # One family writes its end before each text; the end of the document before is there already.
        return () if eod in special.begins else special.begins
    if bod_token == NONE:
        return ()
    begin = token_id("data.bod_token", bod_token, name, vocab)
    if begin == eod:
        raise PlaitError(f"data.bod_token={bod_token!r} is the token that ends a document; take another, or none").at(
            "data.bod_token", bod_token, fits="another token, or none"
        )
    return (begin,)


def _never_from_text(inner: Any, special: Set[str | None]) -> list[str]:
    """Mark the added tokens that a folder calls special as such, if the tokenizer's file does not; returns those."""
    from tokenizers import AddedToken

    unmarked = sorted(
        token.content
        for token in inner.get_added_tokens_decoder().values()
        if token.content in special and not token.special
    )
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in unmarked])
    return unmarked
