"""From text to token ids: plain bytes, or a file of the library `tokenizers`."""

import hashlib
from array import array
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from plait.contract.errors import PlaitError, near_miss
from plait.data.special_tokens import SpecialTokens, special_tokens


class Tokenizer(Protocol):
    """size: ids are below it. eod: the id that ends a document. digest: identifies tokenizer and eod in a cache key.

    cheap: whether encoding takes no longer than handing the text to another process.
    """

    size: int
    eod: int
    digest: str
    cheap: bool

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """The ids of each UTF-8 text, without special tokens."""


class Bytes:
    """Ids 0 to 255 are the bytes themselves, 256 ends a document."""

    size = 257
    eod = 256
    digest = "bytes"
    cheap = True

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]


class FromFile:
    """A `tokenizer.json`, with what the files beside it say of its special tokens.

    Special tokens spelt out in a text are encoded as plain characters. Other added tokens are part of the vocabulary,
    such as the tags of HTML in Gemma's.
    """

    cheap = False
    special: SpecialTokens

    def __init__(self, name: str, file: Path, eod_token: str | None) -> None:
        from tokenizers import Tokenizer as Inner

        try:
            content = file.read_bytes()
            self._inner = Inner.from_str(content.decode())
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
        vocab: dict[str, Any] = self._inner.get_vocab(with_added_tokens=True)
        self.size = max(vocab.values(), default=-1) + 1  # ids may have gaps
        self.special = special_tokens(file, self._inner)
        self.eod = self.special.eod(name, vocab, eod_token)
        plain = _never_from_text(self._inner, self.special.special | {eod_token})
        self.digest = f"{hashlib.sha256(content).hexdigest()}:{self.eod}:{','.join(plain)}"

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        encoded = self._encode([text.decode("utf-8", "replace") for text in texts], add_special_tokens=False)
        # np.array(one.ids) takes twice as long
        return [np.frombuffer(array("I", one.ids), np.uint32) for one in encoded]


def load(name: str, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer `name`: "bytes" or "auto", a file, a folder. Raises PlaitError for no tokenizer or no eod token."""
    if name in ("bytes", "auto"):
        if eod_token is not None:
            raise PlaitError(
                f"data.eod_token={eod_token!r} is for tokenizers read from a file; bytes end documents by id 256"
            ).at("data.eod_token", eod_token, fits="null")
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
    return FromFile(name, file, eod_token)


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
