"""SHA256SUMS beside weights: written by what writes weights, compared before they are used, once."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plait.checkpoint import files, sums
from plait.checkpoint.checked import CheckedFile
from plait.checkpoint.export import export
from plait.checkpoint.init_from import check_weights, read_weights
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.checkpoint.sums import SUMS, check_sums
from plait.checkpoint.weight_files import INDEX
from plait.contract.errors import PlaitError
from plait_models.convert import convert
from tests.helpers.hostile import Mine, checkpoint

SHAPES = {"a": (4, 3), "b": (3,)}


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(12.0).reshape(4, 3), "b": torch.ones(3)}


def flip(file: Path, at: int = -1) -> None:
    """The exponent of the last number grows: 1.0 becomes about 1e38."""
    content = bytearray(file.read_bytes())
    content[at] ^= 0x40
    file.write_bytes(content)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export(weights(), tmp_path / "export", is_writer=True, max_shard_bytes=50)
    return tmp_path / "export"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "export": lambda folder: export(weights(), folder / "export", is_writer=True) or folder / "export",
    "in shards": lambda folder: export(weights(), folder / "export", True, max_shard_bytes=50) or folder / "export",
    "convert": lambda folder: convert(Mine(), checkpoint(folder), folder / "hf", "hf"),
    "convert back": lambda folder: convert(
        Mine(), convert(Mine(), checkpoint(folder), folder / "hf", "hf"), folder / "plait", "plait"
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_sha256sum_checks_what_is_written(tmp_path: Path, writer: str) -> None:
    folder = WRITERS[writer](tmp_path)
    ran = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {line.split(": ")[0] for line in ran.stdout.splitlines()} == {f.name for f in folder.iterdir()} - {SUMS}


def start(path: Path) -> None:
    """Both that the launcher does and that ranks do."""
    check_weights(path, SHAPES)
    read_weights(path, weights())


READERS: dict[str, Callable[[Path], object]] = {
    "init_from": start,
    "convert": lambda path: convert(Mine(), path, path.parent / "converted", "hf"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_is_refused(exported: Path, reader: str) -> None:
    flip(exported / "model-00002-of-00002.safetensors")
    with pytest.raises(PlaitError, match=r"model-00002-of-00002\.safetensors was changed after SHA256SUMS was written"):
        READERS[reader](exported)
    assert not (exported.parent / "converted").exists()


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_of_a_checkpoint_is_refused(tmp_path: Path, reader: str) -> None:
    path = checkpoint(tmp_path)
    flip(path / "__0_0.distcp", (path / "__0_0.distcp").read_bytes().index(torch.arange(12.0).numpy().tobytes()) + 7)
    with pytest.raises(PlaitError, match=r"step-1.*its file __0_0\.distcp was changed after it was written"):
        READERS[reader](path)
    assert not (tmp_path / "converted").exists()


def test_one_file_of_such_a_folder(exported: Path) -> None:
    shapes = [{"a": (4, 3)}, {"b": (3,)}]
    for file, shape in zip(sorted(exported.glob("*.safetensors")), shapes, strict=True):
        check_weights(file, shape)
        flip(file)
        with pytest.raises(PlaitError, match=f"{file.name} was changed"):
            check_weights(file, shape)


def test_a_file_that_is_listed_must_be_there(exported: Path) -> None:
    (exported / INDEX).unlink()
    with pytest.raises(PlaitError, match=f"{INDEX} is missing, which SHA256SUMS lists"):
        check_weights(exported, SHAPES)


def test_without_sums_it_is_read_as_it_is(exported: Path) -> None:
    (exported / SUMS).unlink()
    flip(exported / "model-00002-of-00002.safetensors")
    check_weights(exported, SHAPES)


@pytest.mark.parametrize("reader", READERS)
def test_sums_that_are_no_file_do_not_pass_as_none(exported: Path, reader: str) -> None:
    """A pipe, or a link to nothing, in the place of the digests must not turn the comparison off."""
    (exported / SUMS).unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to(exported / "gone"), Path.mkdir):
        make(exported / SUMS)
        with pytest.raises(PlaitError, match=f"{SUMS} cannot be read: it is neither a file nor a link to one"):
            READERS[reader](exported)
        (exported / SUMS).rmdir() if (exported / SUMS).is_dir() else (exported / SUMS).unlink()


def test_further_files_do_not_matter(exported: Path) -> None:
    (exported / "tokenizer.json").write_text("{}")
    check_weights(exported, SHAPES)


def test_sums_that_others_wrote(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.txt").write_text("x")
    ran = subprocess.run(
        "sha256sum --binary model.safetensors > SHA256SUMS; find . -name '*.txt' -exec sha256sum {} + >> SHA256SUMS",
        shell=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0
    check_weights(tmp_path, SHAPES)
    flip(tmp_path / "sub" / "a b.txt")
    with pytest.raises(PlaitError, match=r"a b\.txt was changed"):
        check_weights(tmp_path, SHAPES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0" * 64 + "  ../secret\n", r"line 1 names '\.\./secret', which is not in the folder"),
        ("0" * 64 + "  /etc/passwd\n", "line 1 names '/etc/passwd', which is not in the folder"),
        ("0" * 63 + "  model.safetensors\n", "line 1 is not a digest and a name"),
        ("\n\x00\n", "line 1 is not a digest and a name"),
    ],
)
def test_sums_that_cannot_be(exported: Path, line: str, message: str) -> None:
    (exported / SUMS).write_text(line)
    with pytest.raises(PlaitError, match=rf"SHA256SUMS cannot be read: {message}"):
        check_sums(exported)


def test_ranks_do_not_compare_again(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_weights(exported, SHAPES)

    def forbidden(*_: object) -> None:
        raise AssertionError("a rank reads every byte once more")

    monkeypatch.setattr(files, "digest", forbidden)
    monkeypatch.setattr(sums, "digests", forbidden)
    read_weights(exported, {name: torch.zeros(shape) for name, shape in SHAPES.items()})


def test_of_a_checkpoint_only_ranks_read_tensors_and_only_those_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"model.{name}": tensor for name, tensor in weights().items()} | {"optimizer.a.m": torch.zeros(4, 3)}
    Saver(Store(tmp_path), "sync").save(state, 1)
    read: list[str] = []
    before = CheckedFile._read
    monkeypatch.setattr(CheckedFile, "_read", lambda self, *args: (read.append(self.name), before(self, *args)))
    check_weights(tmp_path / "step-1", SHAPES)
    assert read == []
    read_weights(tmp_path / "step-1", {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    assert read == [".metadata.pieces", ".metadata", "__0_0.distcp.pieces", "__0_0.distcp", "__0_0.distcp"]
