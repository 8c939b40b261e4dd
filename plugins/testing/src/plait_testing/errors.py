"""What an error is about: tests compare its key, its value and what would fit, so that its wording can change."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from plait import PlaitError

ANY: Any = object()  # not compared


@contextlib.contextmanager
def raises_about(
    key: str, value: Any = ANY, fits: str | Iterable[Any] = ()
) -> Iterator[pytest.ExceptionInfo[PlaitError]]:
    """Inside, a PlaitError must be raised that `is_about` these: `with raises_about("train.steps", 0):`."""
    with pytest.raises(PlaitError) as caught:
        yield caught
    is_about(caught.value, key, value, fits)


def is_about(error: PlaitError | None, key: str, value: Any = ANY, fits: str | Iterable[Any] = ()) -> None:
    """Asserts the key and the value of `error`, and that `fits` is among what would fit: values, or words of it."""
    assert error is not None, f"no error about {key}"
    assert error.key == key, f"it is about {error.key}: {error}"
    assert value is ANY or error.value == value, f"its value is {error.value!r}: {error}"
    for each in (fits,) if isinstance(fits, str) else fits:
        assert error.fits is not None, f"it does not say what would fit: {error}"
        assert each in error.fits, f"what would fit is {error.fits}: {error}"
    assert len(str(error).splitlines()) == 1, f"it has several lines: {error}"
