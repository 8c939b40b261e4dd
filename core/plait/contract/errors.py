"""The error whose sentence a user reads, and the usual sentences."""

from collections.abc import Collection, Iterable
from typing import Any, Self

SHOWN = 80  # characters shown of a value


class PlaitError(Exception):
    """A mistake that the user can fix: one sentence that names the key, the value and what would fit.

    The command line prints the sentence without a traceback. Code reads the parts: if a key or an argument is at fault,
    `PlaitError(sentence).at(key, value, fits)` keeps them as attributes. They are plain values, since errors travel
    between processes.

    exit_code: of the command that ends with the error.
    key: as the user writes it, such as "train.seq_len"; None if no key is at fault.
    value: what the key was given; None if it was given nothing.
    fits: the values that would fit, or in words what would; None if that is not known.
    """

    exit_code: int = 1
    key: str | None = None
    value: Any = None
    fits: str | tuple[Any, ...] | None = None

    def at(self, key: str, value: Any = None, fits: str | Iterable[Any] | None = None) -> Self:
        """This error, about `key`: `raise PlaitError(sentence).at(key, value, fits=(1, 2))`."""
        self.key, self.value = key, value
        self.fits = fits if fits is None or isinstance(fits, str) else tuple(fits)
        return self


class UnknownKey(PlaitError):
    """A key that does not exist. fits: the keys of its node."""


def unknown_key(key: str, known: Collection[str]) -> UnknownKey:
    """The error for a key that does not exist; `known`: the keys that do."""
    sentence = f"unknown key {key}; available: {', '.join(known)}{near_miss(key.rpartition('.')[2], [*known])}"
    return UnknownKey(sentence).at(key, fits=known)


def no_default(key: str) -> PlaitError:
    """The error for a key that a user has to give."""
    return PlaitError(f"{key} must be given; it has no default").at(key)


def misfit(key: str, value: Any, fits: str) -> PlaitError:
    """The error for a value that does not fit; `fits` continues the sentence "it must be"."""
    return PlaitError(f"{key} is {in_yaml(value)}; it must be {fits}").at(key, value, fits=fits)


def one_of(key: str, value: Any, options: list[str]) -> PlaitError:
    """The error for a value that is none of `options`."""
    fits = " or ".join(part for part in (", ".join(options[:-1]), options[-1]) if part)
    sentence = f"{key} is {in_yaml(value)}; it must be {fits}{near_miss(str(value), options)}"
    return PlaitError(sentence).at(key, value, fits=options)


def in_yaml(value: Any) -> str:
    """`value` as written in YAML, shortened."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    return short(text)


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def near_miss(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """`"; did you mean 'dim'?"` if a known name is close to `name`, or begins with it, else an empty string."""
    import difflib

    # three letters say which name they begin, fewer do not
    close = difflib.get_close_matches(name, known, n=1) or [k for k in known if len(name) > 2 and k.startswith(name)]
    return f"; did you mean {close[0]!r}?" if close else ""


def absent(what: str, distribution: str) -> str:
    """The sentence for `what`, which only this distribution has."""
    return f"{what} is in {distribution}, which is not installed: pip install {distribution}"
