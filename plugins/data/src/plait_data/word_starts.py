"""Which tokens begin a word, as a tokenizer's file marks them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plait import PlaitError

BEGINS = ("\u0120", "\u2581")  # what byte-level BPE and SentencePiece write for the space before a word


def starts_of_words(tokenizer: str, vocab: dict[str, int], special: Sequence[int]) -> np.ndarray:
    """(vocabulary,) bool: whether the token begins a word; special tokens do.

    Raises PlaitError if the file `tokenizer`, or that in the folder of this name, does not mark words.
    """
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    inside = json.loads(file.read_bytes().decode("utf-8-sig"))["model"].get("continuing_subword_prefix")
    begins = np.zeros(max(vocab.values()) + 1, bool)
    for token, number in vocab.items():
        begins[number] = not token.startswith(inside) if inside else token.startswith(BEGINS)
    if not begins.any():
        raise PlaitError(
            f"data.whole_words=true, but data.tokenizer={tokenizer} does not mark where words begin: set "
            "data.whole_words=false"
        ).at("data.whole_words", True, fits=(False,))
    begins[list(special)] = True
    return begins
