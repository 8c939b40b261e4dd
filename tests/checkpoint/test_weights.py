"""Weights from and to files of safetensors: what is refused, and what the files look like. One process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.checkpoint import saved_twice
from plait.checkpoint.export import export
from plait.checkpoint.init_from import check_weights, read_weights
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.checkpoint.weight_files import INDEX
from plait.checkpoint.weights import split
from plait.contract.errors import PlaitError

SHAPES = {"embed.weight": (8, 4), "norm.weight": (4,), "scale": ()}
TIES = {"head.weight": "embed.weight"}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def started(path: Path, ties: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    """What a run starts from: the launcher looks at the files, then ranks read them."""
    into = blank()
    check_weights(path, SHAPES, ties or {})
    read_weights(path, into, ties or {})
    return into


def refused(path: Path, message: str, ties: dict[str, str] | None = None) -> PlaitError:
    """Both refuse it, and nothing is read; of tied parameters the first value, which the second is compared with."""
    into = blank()
    for read in (lambda: check_weights(path, SHAPES, ties or {}), lambda: read_weights(path, into, ties or {})):
        with pytest.raises(PlaitError, match=message) as caught:
            read()
    assert ties or same(into, blank())
    return caught.value


def test_a_file_a_folder_and_a_checkpoint(tmp_path: Path) -> None:
    whole = tensors()
    save_file(whole, tmp_path / "a.safetensors")
    (tmp_path / "folder").mkdir()
    for name, tensor in whole.items():
        save_file({name: tensor}, tmp_path / "folder" / f"{name}.safetensors")
    Saver(Store(tmp_path), "sync").save({f"model.{name}": tensor for name, tensor in whole.items()}, 7)
    export(whole, tmp_path / "sharded", is_writer=True, max_shard_bytes=20)
    for path in ("a.safetensors", "folder", "step-7", "sharded"):
        assert same(started(tmp_path / path), whole), path


def test_values_are_cast_to_the_parameters_dtype(tmp_path: Path) -> None:
    save_file(tensors(torch.bfloat16), tmp_path / "a.safetensors")
    rounded = {name: tensor.float() for name, tensor in tensors(torch.bfloat16).items()}
    assert same(started(tmp_path / "a.safetensors"), rounded)


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path: Path, names: list[str]) -> None:
    whole = tensors()
    file = {name: tensor for name, tensor in whole.items() if name != "embed.weight"}
    save_file(file | {name: whole["embed.weight"].clone() for name in names}, tmp_path / "a.safetensors")
    assert same(started(tmp_path / "a.safetensors", TIES), whole)


EMBED = tensors()["embed.weight"]


@pytest.mark.parametrize(
    ("embed", "head", "message"),
    [
        (EMBED, torch.zeros(8, 4), r"'embed.weight' and 'head.weight' differ in .*, but the model ties them: untie"),
        (EMBED, torch.cat([EMBED[:-1], EMBED[-1:] + 1]), "differ in"),
        (EMBED, EMBED.bfloat16(), "differ in"),
        (EMBED, EMBED[:-1], r"'head.weight' has shape \(7, 4\) there and \(8, 4\) in this run"),
        (EMBED.bfloat16(), EMBED.bfloat16().float(), None),
        (EMBED.log(), EMBED.log(), None),
    ],
    ids=["other", "last row", "rounded", "shape", "dtypes of the same values", "NaN"],
)
def test_a_tied_parameter_with_two_values_is_refused(
    embed: torch.Tensor, head: torch.Tensor, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_twice, "ELEMENTS", 12)  # three rows at a time
    save_file(tensors() | {"embed.weight": embed.clone(), "head.weight": head.clone()}, tmp_path / "a.safetensors")
    if message is None:
        started(tmp_path / "a.safetensors", TIES)
    else:
        refused(tmp_path / "a.safetensors", message, TIES)


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (without("scale"), "another model: it lacks 'scale'"),
        (without("norm.weight") | {"norm.wieght": torch.zeros(4)}, "lacks 'norm.weight'; did you mean 'norm.wieght'"),
        (tensors() | {"norm.bias": torch.zeros(4)}, "it has 'norm.bias', which this run's model does not have"),
        (tensors() | {"norm.weight": torch.zeros(5)}, r"'norm.weight' has shape \(5,\) there and \(4,\) in this run"),
    ],
)
def test_another_model(tmp_path: Path, file: dict[str, torch.Tensor], message: str) -> None:
    save_file(file, tmp_path / "a.safetensors")
    Saver(Store(tmp_path), "sync").save({f"model.{name}": tensor for name, tensor in file.items()}, 7)
    for path in ("a.safetensors", "step-7"):
        refused(tmp_path / path, message)


@pytest.mark.parametrize(
    "kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
)
@pytest.mark.parametrize("scale", [None, "embed.weight_scale_inv"])
def test_numbers_that_are_no_weights_by_themselves(tmp_path: Path, kind: torch.dtype, scale: str | None) -> None:
    file = tensors() | {"embed.weight": torch.ones(8, 4).to(kind)} | ({scale: torch.ones(1)} if scale else {})
    save_file(file, tmp_path / "a.safetensors")
    beside = f", with '{scale}' beside it" if scale else ""
    said = f"1 of the 3 tensors of this model in .* are stored as [A-Z0-9_]+, such as 'embed.weight'{beside}: they are"
    assert refused(tmp_path / "a.safetensors", said).key == "checkpoint.init_from"


def test_a_buffer_of_integers_is_read(tmp_path: Path) -> None:
    save_file(tensors() | {"scale": torch.tensor(7)}, tmp_path / "a.safetensors")
    into = blank() | {"scale": torch.tensor(0)}
    check_weights(tmp_path / "a.safetensors", SHAPES, integers={"scale"})
    read_weights(tmp_path / "a.safetensors", into)
    assert into["scale"] == 7


def test_broken_files(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(content[:-1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / INDEX).write_text('{"weight_map": {"scale": "gone.safetensors"}}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / INDEX).write_text('{"weight_map"')
    (tmp_path / "twice").mkdir()
    for name in ("1", "2"):
        (tmp_path / "twice" / f"{name}.safetensors").write_bytes(content)
    for name in ("pipe", "piped index"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "1.safetensors")  # reading it would never end
    os.mkfifo(tmp_path / "piped index" / INDEX)
    (tmp_path / "endless.safetensors").symlink_to("/dev/zero")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "pointer.safetensors").write_text(pointer, encoding="utf-8")
    neither = "it is neither a file nor a link to one"
    for path, message in {
        "none": "no such file or folder",
        "pipe": f"1.safetensors is not a readable safetensors file: {neither}",
        "pipe/1.safetensors": f"1.safetensors is not a readable safetensors file: {neither}",
        "piped index": f"the index .* cannot be read: {neither}",
        "endless.safetensors": f"endless.safetensors is not a readable safetensors file: {neither}",
        "pointer.safetensors": "pointer.safetensors is a pointer of Git LFS, not the weights: run git lfs pull",
        "torn.safetensors": "torn.safetensors is not a readable safetensors file",
        "empty": "holds neither a checkpoint of Plait nor .safetensors files",
        "lost": "names gone.safetensors, which is not there",
        "torn": "the index .* cannot be read",
        "twice": "is in both .*1.safetensors and .*2.safetensors",
    }.items():
        with pytest.raises(PlaitError, match=message):
            check_weights(tmp_path / path, SHAPES)


def folder_of(path: Path, files: list[str]) -> Path:
    """Whole weights in each of the files, each of other values; `.json` files are empty objects, indices name `a`."""
    path.mkdir()
    for number, name in enumerate(files):
        if name == INDEX:
            shards = {"scale": "a-00001-of-00001.safetensors"}
            (path / name).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
        elif name.endswith(".safetensors"):
            save_file({key: tensor + number for key, tensor in tensors().items()}, path / name)
        else:
            (path / name).write_text("{}")
    return path


SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    "files",
    [
        ["model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "model.fp16.safetensors"],
        ["model.safetensors", INDEX, "a-00001-of-00001.safetensors"],
        ["model.safetensors", INDEX],
        ["a-00001-of-00001.safetensors", INDEX, "consolidated.safetensors", "pytorch_model.bin"],
        ["model.fp16.safetensors"],
    ],
)
def test_of_several_sets_of_weights_the_one_of_from_pretrained_is_read(files: list[str], tmp_path: Path) -> None:
    assert same(started(folder_of(tmp_path / "a", files)), tensors())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([INDEX, "consolidated.safetensors"], r"index .* names a-00001-of-00001\.safetensors, which is not there"),
        ([SHARD_1], f"has {SHARD_1}, but lacks {SHARD_2}"),
        ([SHARD_1, SHARD_2, "consolidated.safetensors"], f"several sets .* {SHARD_1} and consolidated.safetensors"),
        ([SHARD_1, "model-00001-of-00003.safetensors"], f"among them {SHARD_1} and model-00001-of-00003.safetensors"),
        (
            ["model.fp16.safetensors", "pytorch_model.bin"],
            r"holds pytorch_model\.bin, .*, and model\.fp16\.safetensors",
        ),
        (
            ["pytorch_model.bin.index.json"],
            "nor .safetensors files, but pytorch_model.bin.index.json, which is pickled",
        ),
        (["model.safetensors", "adapter_config.json"], "holds an adapter (.*), and Plait starts from whole weights"),
        (["adapter_model.safetensors", "adapter_config.json"], "holds an adapter (.*), and .* merge it into"),
    ],
)
def test_a_folder_that_does_not_say_which_weights_to_read(files: list[str], message: str, tmp_path: Path) -> None:
    refused(folder_of(tmp_path / "a", files), message.replace("(.*)", r"\(.*\)"))


def test_export_writes_one_file_or_shards_as_hugging_face_does(tmp_path: Path) -> None:
    whole = tensors()
    export(whole, tmp_path / "one", is_writer=True)
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["SHA256SUMS", "model.safetensors"]
    export(whole, tmp_path / "one", is_writer=True, max_shard_bytes=130)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["SHA256SUMS", *names, INDEX]
    index = json.loads((tmp_path / "one" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 148}
    assert index["weight_map"] == {"embed.weight": names[0], "norm.weight": names[1], "scale": names[1]}
    parts = [load_file(tmp_path / "one" / name) for name in names]
    assert same(parts[0] | parts[1], whole)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def test_export_where_it_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    export(tensors(), tmp_path / "one", is_writer=True)
    (tmp_path / "one.tmp").write_text("in the way")
    with pytest.raises(PlaitError, match=f"the weights in {tmp_path / 'one'} cannot be written"):
        export(blank(), tmp_path / "one", is_writer=True)
    assert same(load_file(tmp_path / "one" / "model.safetensors"), tensors())


def test_only_the_writer_writes(tmp_path: Path) -> None:
    export(tensors(), tmp_path / "one", is_writer=False)
    assert not list(tmp_path.iterdir())


def test_the_parent_checks_without_torch(tmp_path: Path) -> None:
    save_file(tensors(torch.bfloat16), tmp_path / "a.safetensors")
    code = (
        "import sys; from plait.checkpoint.store import Store; from plait.checkpoint.init_from import check_weights;"
        f"check_weights({str(tmp_path / 'a.safetensors')!r}, {SHAPES!r}); Store({str(tmp_path)!r}).latest();"
        "assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_a_file_may_be_exactly_full():
    assert list(split({"a": 5, "b": 5, "c": 1}, 10).values()) == [["a", "b"], ["c"]]
    assert split({"a": 5, "b": 5}, 10) == {"model.safetensors": ["a", "b"]}
