"""Files to validate on, beside the data of training: one path, or several with names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from plait import Batch, Batches, PlaitError, misfit
from plait_data.around import Around

KEY = "data.validation_path"


def check_paths(_: Any, __: Any, value: Any) -> None:
    paths = value if isinstance(value, Mapping) else {"set": value}
    named = all(isinstance(name, str) and name.replace("-", "_").isidentifier() for name in paths)
    if value is not None and not (paths and named and all(isinstance(path, str) and path for path in paths.values())):
        raise misfit(KEY, value, "a path, or paths by name, such as {news: news.jsonl, code: code.jsonl}")


def by_name(paths: str | Mapping[str, str] | None) -> dict[str, str]:
    """Name -> path; "" is the name of a single one."""
    return {} if paths is None else {"": paths} if isinstance(paths, str) else dict(paths)


@contextmanager
def blaming_set(name: str, path: str) -> Iterator[None]:
    """Errors about the files of a set name the key that names them."""
    try:
        yield
    except PlaitError as error:
        key = f"{KEY}.{name}" if name else KEY
        raise PlaitError(f"{key}={path}: {error}").at(key, path, error.fits) from error


class WithSets(Around):
    """The batches of `batches`, and those of `sets` to validate on, by name; "" is what has no name."""

    def __init__(self, batches: Batches, sets: Mapping[str, Batches]) -> None:
        super().__init__(batches)
        self._sets = sets
        self.validation_sets = tuple(filter(None, sets))

    def take(self, first: int) -> Batch:
        return self._batches.take(first)

    def validation(self, index: int) -> Batch:
        """Of several sets one after the other, for who knows no names, such as a mixture."""
        names = list(self._sets)
        return self._sets[names[index % len(names)]].train(index // len(names))

    def validation_of(self, name: str, index: int) -> Batch:
        return self._sets[name].train(index)

    def held_out(self, name: str = "") -> int | None:
        """Of several sets without their names: not known, because they take turns."""
        one = name or (next(iter(self._sets)) if len(self._sets) == 1 else "")
        return self._sets[one].epoch if one in self._sets else None
