"""Small models that strategies are tried on, each unlike the others in what a strategy might take for granted.

`llama3`: grouped queries and SwiGLU; `tied`: the same with tied embeddings, larger. `odd`: biases, LayerNorm, GELU,
learned positions, tied, other names. `qk_norm`: normed queries and keys. `mla`: multi-head latent attention.
"""

from collections.abc import Callable
from typing import Any

VOCAB = 64


def llama3(**changes: Any) -> Any:
    """A tiny one, with these changes."""
    from plait.models.llama3 import Llama3

    tiny = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}
    return Llama3(**{**tiny, "vocab_size": VOCAB, **changes})


def _tied() -> Any:
    return llama3(dim=48, n_layers=3, ffn_dim=64, tie_embeddings=True)


def _odd() -> Any:
    from plait.testing.models.odd import Odd

    return Odd(vocab_size=VOCAB)


def _qk_norm() -> Any:
    from plait.testing.models.qk_norm import QkNorm

    return QkNorm(vocab_size=VOCAB)


def _mla() -> Any:
    from plait.testing.models.mla import Mla

    return Mla(vocab_size=VOCAB)


MODELS: dict[str, Callable[[], Any]] = {
    "llama3": llama3,
    "tied": _tied,
    "odd": _odd,
    "qk_norm": _qk_norm,
    "mla": _mla,
}
