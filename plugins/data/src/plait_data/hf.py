"""Data sets that Hugging Face `datasets` streams, from the hub or from local files."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any, ClassVar

import attrs

from plait import PlaitError, Source
from plait_data.documents import encode
from plait_data.left_out import NO_TEXT, LeftOut
from plait_data.place_kept import check_place_kept
from plait_data.text import text_at
from plait_data.text_source import Say, TextSource, at_least, given

# The builders of `datasets` that read plain data. Others may unpickle files, as `pandas` did, or open connections.
BUILDERS = ("arrow", "cache", "conll", "csv", "json", "parquet", "text", "webdataset", "xml")
OF_FILES = ("csv", "json", "parquet", "text")


def plain(value: Any) -> Any:
    """A config's lists and mappings as Python's own types."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    return value


@attrs.define(kw_only=True, slots=False)
class Hf(TextSource):
    """A stream of documents, tokenised on the way.

    name:       a data set of the hub, a local folder, or a builder such as "json" with `data_files`.
    config:     the data set's configuration; None: its only one.
    data_files: a path, a list of paths, or a mapping from splits to paths.
    split, text_key: the split to train on, and the column with the text.
    shuffle_buffer: how many documents are read at a time and shuffled; 1: the order of the stream.
    validation_split: the split to validate on; None: the first `validation_documents` of `split`, which training
        then leaves out.
    """

    name: str = attrs.field(validator=given)
    config: str | None = None
    data_files: Any = attrs.field(default=None, converter=plain)
    split: str = "train"
    text_key: str = "text"
    shuffle_buffer: int = attrs.field(default=1000, validator=at_least(1))
    validation_split: str | None = None
    validation_documents: int = attrs.field(default=1000, validator=at_least(0))

    indexable: ClassVar[bool] = False

    @property
    def has_validation(self) -> bool:
        return self.holds_out or bool(self.validation_path)

    @property
    def holds_out(self) -> bool:
        """Whether the stream has documents to validate on."""
        return not self.validation_path and (self.validation_split is not None or self.validation_documents > 0)

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        super().check(seq_len=seq_len, vocab_size=vocab_size)
        if find_spec("datasets") is None:
            raise PlaitError("data=hf needs the library datasets: pip install 'plait-data[hf]'").at("data", "hf")
        if self.name in OF_FILES and self.data_files is None:  # datasets would take all files of the current folder
            raise PlaitError(f"data.name={self.name} reads files: data.data_files must name them").at(
                "data.data_files", fits="names of files"
            )

    def prepare(self, say: Say) -> None:
        check_place_kept()
        if self.encoder.said:
            say(self.encoder.said)
        for split in filter(None, (self.split, self.validation_split)):
            say(f"opening {self.name}, split {split}")
            if next(self.texts(split), None) is None:
                raise PlaitError(f"data.name={self.name} has no documents in its split {split!r}").at(
                    "data.name", self.name
                )
        self.prepare_sets(say)

    def check_length(self, *, seq_len: int) -> None:
        self.of_sets(lambda each: each.check_length(seq_len=seq_len))

    def fingerprint(self) -> str:
        """Of the stream's names and options; the data behind them is not read before training."""
        names = (self.name, self.config, self.data_files, self.split, self.text_key)
        options = (self.shuffle_buffer, self.validation_split, self.validation_documents if self.holds_out else 0)
        return hashlib.sha256(repr((names, options, self.encoder.digest)).encode()).hexdigest()

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> Any:
        from plait_data.stream import StreamBatches

        return self.beside(StreamBatches(self, seq_len, seed, global_batch_size, dp), seed)

    def at(self, path: str) -> Source:
        return text_at(path, self)

    def rows(self, split: str) -> Any:
        """The `datasets.IterableDataset` of `split`. Raises PlaitError if it cannot be opened, or may run code."""
        from datasets import load_dataset_builder

        try:
            builder = load_dataset_builder(self.name, self.config, data_files=self.data_files)
            package, _, kind = type(builder).__module__.rpartition(".")
            if package.rpartition(".")[0] == "datasets.packaged_modules" and kind in BUILDERS:
                return builder.as_streaming_dataset(split=split)
        except Exception as error:  # datasets and the libraries below it may raise anything
            raise self._cannot("open", split, error) from error
        raise PlaitError(
            f"data.name={self.name} is read by the builder {kind!r} of datasets, which may run code in its files; "
            f"allowed builders: {', '.join(BUILDERS)}; convert the data for one of these"
        ).at("data.name", self.name, fits=BUILDERS)

    def texts(self, split: str, rows: Any = None, lost: LeftOut | None = None) -> Iterator[bytes]:
        """The documents of `split`, or of `rows` from it, in order; empty for a row that holds None.

        lost: counts those, and what was replaced.
        """
        lost = LeftOut() if lost is None else lost
        iterator = iter(self.rows(split) if rows is None else rows)
        where = f"data.name={self.name}, split {split}"
        while True:
            try:
                row = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                raise self._cannot("read", split, error) from error
            value = row.get(self.text_key, "")
            text = b"" if value is None else encode(row.get(self.text_key), row, self.text_key, where, lost)
            lost.add(NO_TEXT, int(not text))
            yield text

    def validation_texts(self) -> Iterator[bytes]:
        """The documents to validate on."""
        if self.validation_split is not None:
            return self.texts(self.validation_split)
        return islice(self.texts(self.split), self.validation_documents)

    def _cannot(self, do: str, split: str, error: Exception) -> PlaitError:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return PlaitError(f"data.name={self.name}, split {split!r}: datasets cannot {do} it: {reason}").at(
            "data.name", self.name
        )
