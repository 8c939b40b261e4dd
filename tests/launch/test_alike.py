"""Machines of a run that differ are refused in one sentence, before anything is written."""

import functools
import hashlib
import os
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch.distributed as dist

from plait.check import facts, shared
from plait.check.alike import Told, check_alike, difference, tell
from plait.contract.errors import PlaitError
from plait.host import check, compose
from plait.parallel.agreement import on_rank_0
from plait.system.errors import packed

TINY = ("strategy=[fsdp2]", "launch.device=cpu", "launch.nnodes=2", "launch.rdzv_endpoint=localhost:29511")


@functools.cache
def composed():
    return compose(TINY)


@pytest.fixture
def config(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return composed()


def on_beta(told: Told, kind: str, name: str, value: str | None) -> Told:
    part = "command" if kind == "config" else "machine"
    return attrs.evolve(told, rank=1, host="beta", **{part: {**getattr(told, part), (kind, name): value}})


@pytest.mark.parametrize(
    ("kind", "name", "value", "sentence"),
    [
        ("config", "optimizer.lr", "0.03", r"optimizer\.lr=0\.03 on beta, 0\.\d+ on alpha: .* the same command"),
        ("config", "train.steps", None, r"no train\.steps on beta, \d+ on alpha"),
        ("version", "torch", "2.12.0", r"beta has torch 2\.12\.0, alpha 2\.\S+: install the same versions"),
        ("version", "plait-fsdp2", None, r"beta has no plait-fsdp2, alpha \d\S+: install the same versions"),
        ("version", "python", "3.10.1", r"beta has python 3\.10\.1, alpha 3\.\S+: install"),
        ("code", "plait_models/llama3.py", "0", r"plait_models/llama3\.py on beta is not that on alpha: install"),
        ("code", "plait_fsdp2/more.py", "0", r"plait_fsdp2/more\.py is on beta alone"),
        ("variable", "NVIDIA_TF32_OVERRIDE", "0", r"beta has NVIDIA_TF32_OVERRIDE=0, alpha no NVIDIA_TF32_OVERRIDE"),
        ("device", "launch.device", "cuda", r"beta trains on cuda, alpha on cpu"),
        ("data", "data", "0", r"the data or its tokenizer on beta is not that on alpha: give"),
    ],
)
def test_what_differs_is_named_with_both_machines(config, kind, name, value, sentence):
    alpha = attrs.evolve(tell(config), host="alpha")
    assert difference([alpha, attrs.evolve(alpha, rank=1, host="beta")]) is None
    beta = on_beta(alpha, kind, name, value)
    assert alpha.digests != beta.digests
    with pytest.raises(PlaitError, match=f"^the machines of a run must be alike: {sentence}") as caught:
        raise difference([alpha, beta]) or AssertionError("no difference")
    assert (caught.value.key, caught.value.value) == (name, value)


def test_machines_of_one_name_are_told_apart_by_rank(config):
    alpha = attrs.evolve(tell(config), host="node")
    other = attrs.evolve(on_beta(alpha, "version", "torch", "2"), host="node")
    assert "node (rank 1) has torch 2, node (rank 0) " in str(difference([alpha, other]))


def test_many_differences_are_counted(config):
    alpha = attrs.evolve(tell(config), host="alpha")
    beta = alpha
    for name in sorted(name for kind, name in alpha.command if name.startswith("train."))[:5]:
        beta = on_beta(beta, "config", name, "'other'")
    assert " and 2 more: " in str(difference([alpha, beta]))


def test_what_a_machine_has_of_its_own_may_differ(config):
    other = compose([*TINY, "launch.nproc_per_node=3", "launch.rdzv_endpoint=127.0.0.1:29511"])
    assert facts.of_command(config) == facts.of_command(other)
    assert facts.of_command(config) != facts.of_command(compose([*TINY, "launch.timeout_seconds=5"]))


def test_only_one_rank_of_a_machine_reads_its_files(config, monkeypatch):
    assert tell(config).machine is not None
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert tell(config).machine is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert tell(config).machine is None  # all ranks have the same files


def test_what_a_machine_cannot_read_ends_all(config):
    alpha = attrs.evolve(tell(config), host="alpha")
    problem = PlaitError("data.path=x: no such file or folder").at("data.path", "x")
    beta = Told(1, "beta", alpha.command, {}, packed(problem))
    error = difference([alpha, beta])
    assert (str(error), error.key) == ("data.path=x: no such file or folder (on beta)", "data.path")


def test_the_code_of_a_users_own_model_counts(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "net_of_mine.py").write_text(
        "import os\nfrom plait_models.llama3 import Llama3\nfrom part_of_mine import x\nclass Net(Llama3): pass\n"
    )
    (tmp_path / "part_of_mine.py").write_text("x = 1\n")
    config = config.with_value("model._target_", "net_of_mine.Net")
    before = {name: value for (kind, name), value in facts.of_machine(config).items() if kind == "code"}
    assert before["part_of_mine.py"] == hashlib.sha256(b"x = 1\n").hexdigest()
    assert {"net_of_mine.py", "part_of_mine.py", "plait/check/facts.py", "plait_fsdp2/__init__.py"} <= before.keys()
    assert {"plait_models/llama3.py", "plait_models/gqa.py"} <= before.keys()  # what it builds on
    assert not any(name.startswith(("os.", "torch/")) for name in before)


def test_the_packages_of_all_chosen_plugins_count(config):
    chosen = compose([*TINY, "model=gpt2_debug", "loss=z_loss", "observer=[gradients]"])
    packages = {name.partition("/")[0] for kind, name in facts.of_machine(chosen) if kind == "code"}
    assert packages >= {"plait", "plait_fsdp2", "plait_gpt2", "plait_z_loss", "plait_observers", "plait_data"}
    assert "plait_models" not in packages


def test_the_tokenizer_of_the_models_folder_makes_the_data(config, monkeypatch):
    before = facts.of_machine(config)["data", "data"]
    assert config.data["tokenizer"] == "auto"
    monkeypatch.setattr("plait_models.llama3.Llama3.tokenizer_from", "/nowhere", raising=False)
    with pytest.raises(PlaitError, match="/nowhere"):
        facts.of_machine(config)
    assert facts.of_machine(config.with_value("data.tokenizer", "bytes"))["data", "data"] == before


@pytest.mark.parametrize("at", [0, 70_000, 199_999, 100_000])
def test_other_weights_of_the_same_size_are_seen(config, tmp_path, at):
    folder = tmp_path / "weights"
    folder.mkdir()
    one, other = bytes(200_000), bytearray(200_000)
    other[max(at - 15_000, 0) : at + 15_000] = b"x" * len(other[max(at - 15_000, 0) : at + 15_000])
    config = config.with_value("checkpoint.init_from", str(folder))
    found = []
    for content in (one, bytes(other)):
        (folder / "model.safetensors").write_bytes(content)
        found.append({key: value for key, value in facts.of_machine(config).items() if key[0] == "files"})
    assert [list(each) for each in found] == [[("files", f"checkpoint.init_from={folder}/model.safetensors")]] * 2
    assert found[0] != found[1]


def as_machines():
    """Each rank is one of several machines, as its launcher would say."""
    ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    return mock.patch.dict(os.environ, {**ranks, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})


def together(config, lr):
    """(how many gathers, what was raised) on a rank whose command asked for this learning rate."""
    mine = config.with_value("optimizer.lr", lr[dist.get_rank()])
    with as_machines(), mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
        try:
            check_alike(mine)
            return gather.call_count, None
        except PlaitError as error:
            return gather.call_count, str(error)


def test_ranks_that_agree_gather_once_and_others_all_end_with_one_sentence(plait_ranks):
    node = compose(TINY)
    assert plait_ranks.run(together, node, [1e-3, 1e-3], world=2) == [(1, None)] * 2
    (gathers, said), other = plait_ranks.run(together, node, [1e-3, 3e-2], world=2)
    assert (gathers, said) == other
    assert gathers == 2
    assert "optimizer.lr=0.03 on " in said


def looked(folders):
    """What a rank says that sees its own folder in the place of rank 0's."""
    with as_machines(), mock.patch.object(shared, "PATIENCE", 0.2):
        words = on_rank_0(lambda: shared.mark([Path(folders[0])]))
        try:
            shared.check_shared({folders[dist.get_rank()]: next(iter(words.values()))})
        except PlaitError as error:
            return str(error), error.key
    return None


def test_a_folder_that_others_do_not_see_is_refused(plait_ranks, tmp_path):
    here, there = tmp_path / "alpha", tmp_path / "beta"
    for folder in (here, there):
        folder.mkdir()
    assert plait_ranks.run(looked, [str(here)] * 2, world=2) == [None, None]
    said, other = plait_ranks.run(looked, [str(here), str(there)], world=2)
    assert said[0] == other[0]
    assert f"{there} on " in said[0]
    assert "is not the folder that" in said[0]
    assert not [*here.iterdir(), *there.iterdir()]


@pytest.mark.parametrize(("here", "fits"), [(3, True), (1, True), (17, False)])
def test_a_machine_knows_only_its_own_ranks(here, fits):
    """Four ranks share 8 samples; 3 and 1 of them, or 1 and 3, may be here."""
    node = compose([*TINY, f"launch.nproc_per_node={here}", "train.global_batch_size=8", "train.local_batch_size=2"])
    if fits:
        assert check(node).ranks_per_node == here
    else:
        with pytest.raises(PlaitError, match="does not divide into batches"):
            check(node)


def test_the_whole_world_need_not_divide_over_the_machines():
    assert check(compose([*TINY, "launch.nproc_per_node=2"]), 3).layout.world_size == 3
