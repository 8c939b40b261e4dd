"""A resume of two ranks: how many bytes it reads in all processes, and what it makes of damage that one rank finds."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from plait.checkpoint.load import load, load_latest
from plait.checkpoint.save import Saver
from plait.checkpoint.store import MANIFEST, Store
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.parallel.state import canonical_state, is_absent
from plait_testing import whole_run
from plait_testing.pool import Pool

WIDE = ("model.dim=256", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=1024")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "the same": (2, {"fsdp2": {}}),
    "one process": (1, {}),
    "tensor parallel": (2, {"tensor_parallel": {"degree": 2}}),
    "replicas": (4, {"fsdp2": {"shard": 2, "replicate": 2}}),
}
DEAR = ("the same", "one process")


def config_of(layout: str, folder: Path) -> Config:
    """The config of the run `a` in `folder`, in this layout."""
    from plait.host import compose

    world, strategies = LAYOUTS[layout]
    more = ("checkpoint.interval=2", "checkpoint.keep=3", "checkpoint.mode=sync", "train.steps=6", "run.name=a")
    given = whole_run.overrides(strategies, folder, world, *more, "validation.interval=0", model=WIDE)
    return compose([*given, f"data.cache_dir={folder / 'cache'}"])


@pytest.fixture(scope="module")
def trained(plait_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on two ranks, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("reads")
    (folder / "a").mkdir()
    (folder / "a/versions.json").write_text("{}")
    plait_ranks.run(whole_run.run, config_of("the same", folder), folder / "a", world=2)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained / "a", tmp_path / "a")


def bytes_read() -> int:
    """By this process, through system calls, since it began."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def state_of(applied: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    state, _ = applied.checkpoint(optimizer)
    assert not any(map(is_absent, state.values()))
    return {key: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for key, t in state.items()}


def resume(config: Config, folder: str) -> tuple[int | str, list[str], int, list[str]]:
    """The step after which a rank goes on, or its error; what was said; bytes read; what differs from that step."""
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    said: list[str] = []
    trainer = Trainer(config, RunFolder(Path(folder)), said.append)
    before = bytes_read()
    try:
        step = trainer.restore()
    except PlaitError as error:
        dist.barrier()
        return str(error), said, bytes_read() - before, []
    read = bytes_read() - before
    state = state_of(trainer.applied, trainer.optimizer)
    load(Path(folder) / f"checkpoints/step-{step}", *trainer.applied.checkpoint(trainer.optimizer))
    expected = state_of(trainer.applied, trainer.optimizer)
    return step, said, read, [key for key in expected if not torch.equal(state[key], expected[key])]


def sizes(checkpoint: Path, ending: str) -> int:
    return sum(path.stat().st_size for path in checkpoint.iterdir() if path.name.endswith(ending))


def prepared(config: Config, run: Path) -> tuple[list[str], int]:
    """What the launcher says of the run before it starts ranks, and how many bytes it reads."""
    from plait.check.resume import find_checkpoint
    from plait.host import check
    from plait.records.run_folder import RunFolder

    (run / "config.yaml").write_text(yaml.safe_dump(config.plain()))
    checked, said = check(config), []
    before = bytes_read()
    find_checkpoint(checked, RunFolder(run), said.append)
    return said, bytes_read() - before


def longer(layout: str, trained: Path) -> Config:
    return config_of(layout, trained).with_value("train.steps", 8)


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="this system does not count what a process reads")
@pytest.mark.parametrize("layout", [pytest.param(x, marks=pytest.mark.slow) if x in DEAR else x for x in LAYOUTS])
def test_how_often_a_byte_is_read(plait_ranks: Pool, trained: Path, run: Path, layout: str) -> None:
    config, last = longer(layout, trained), run / "checkpoints/step-6"
    tensors = sizes(last, ".distcp")
    assert tensors > 20e6
    prepared(config, run)  # imports
    said, parent = prepared(config, run)
    assert any(line.startswith("checkpoint: resuming after step 6 ") for line in said)
    assert parent < 300_000
    world = LAYOUTS[layout][0]
    ranks = plait_ranks.run(resume, config, str(run), world=world)
    assert [(step, wrong) for step, _, _, wrong in ranks] == [(6, [])] * world
    total = parent + sum(read for _, _, read, _ in ranks)
    metadata = sizes(last, MANIFEST) + sizes(last, ".metadata") + sizes(last, ".pieces")
    times = 2 if layout == "tensor parallel" else 1  # two ranks need each part of a matrix that is divided in columns
    assert total < times * tensors + world * 4 * metadata + 500_000
    assert total > tensors


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


CHANGED = "was changed after it was written (crc32 differs)"
DAMAGE = {
    "tensors of rank 1": (lambda step: flip(step / "__1_0.distcp"), f"its file __1_0.distcp {CHANGED}"),
    "tensors of rank 0": (lambda step: flip(step / "__0_0.distcp"), f"its file __0_0.distcp {CHANGED}"),
    "checksums": (
        lambda step: flip(step / "__1_0.distcp.pieces"),
        f"its file __1_0.distcp.pieces {CHANGED.replace('crc32', 'sha256')}",
    ),
    "metadata": (lambda step: flip(step / ".metadata"), f"its file .metadata {CHANGED}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_that_ranks_find_takes_all_of_them_to_the_one_before(
    plait_ranks: Pool, trained: Path, run: Path, layout: str
) -> None:
    config, (world, _) = longer(layout, trained), LAYOUTS[layout]
    for act, why in DAMAGE.values():
        shutil.rmtree(run)
        shutil.copytree(trained / "a", run)
        act(run / "checkpoints/step-6")
        launcher, _ = prepared(config, run)
        assert any(line.startswith("checkpoint: resuming after step 6 ") for line in launcher)
        assert not any("skipping" in line for line in launcher)
        before = contents(run / "checkpoints")
        ranks = plait_ranks.run(resume, config, str(run), world=world)
        assert [(step, wrong) for step, _, _, wrong in ranks] == [(4, [])] * world
        assert ranks[0][1] == [
            f"skipping the checkpoint {run}/checkpoints/step-6: {why}",
            f"checkpoint: resuming after step 4 from {run}/checkpoints/step-4",
            "checkpoint: resumed after step 4",
        ]
        assert contents(run / "checkpoints") == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("layout", ["the same", "one process"])
def test_when_none_is_sound_all_ranks_end_with_that(plait_ranks: Pool, trained: Path, run: Path, layout: str) -> None:
    config, (world, _) = longer(layout, trained), LAYOUTS[layout]
    flip(run / "checkpoints/step-6/__1_0.distcp")
    flip(run / "checkpoints/step-4/.metadata")
    (run / "checkpoints/step-2/__0_0.distcp").unlink()
    before = contents(run / "checkpoints")
    ranks = plait_ranks.run(resume, config, str(run), world=world)
    assert ranks[0][1] == [
        f"skipping the checkpoint {run}/checkpoints/step-6: its file __1_0.distcp {CHANGED}",
        f"checkpoint: resuming after step 4 from {run}/checkpoints/step-4",
    ]
    assert {error for error, _, _, _ in ranks} == {
        f"no checkpoint in {run}/checkpoints is sound: step-6: its file __1_0.distcp {CHANGED}; step-4: its file "
        f".metadata {CHANGED}; step-2: its file __0_0.distcp is missing; move or remove what is there to start over, "
        "set another run.name, or name a sound one with checkpoint.load=PATH"
    }
    assert contents(run / "checkpoints") == before


def test_a_damaged_one_that_was_named_ends_the_run(plait_ranks: Pool, trained: Path, run: Path, tmp_path: Path) -> None:
    """It does not start over, nor from one that nobody named."""
    config, named = longer("the same", trained), run / "checkpoints/step-6"
    config = config.with_value("checkpoint.load", str(named))
    flip(named / "__1_0.distcp")
    why = f"checkpoint.load={named} cannot be loaded: its file __1_0.distcp {CHANGED}"
    (tmp_path / "b").mkdir()
    (tmp_path / "b/versions.json").write_text("{}")
    for error, said, _, _ in plait_ranks.run(resume, config, str(tmp_path / "b"), world=2):
        assert (error, said) == (why, [])
    flip(named / ".metadata")
    for name in ("step-2", "step-4"):
        flip(run / "checkpoints" / name / "__0_0.distcp")
    elsewhere = shutil.copytree(trained / "a/checkpoints/step-4", tmp_path / "step-4")
    config = config.with_value("checkpoint.load", str(elsewhere))
    for error, _, _, _ in plait_ranks.run(resume, config, str(run), world=2):
        assert str(error).startswith(f"no checkpoint in {run}/checkpoints is sound: step-6: its file ")


def test_a_finished_run_is_checked_by_the_launcher(trained: Path, run: Path) -> None:
    """No rank reads its last checkpoint."""
    config = config_of("the same", trained).with_value("checkpoint.export", False)
    from plait.check.resume import find_checkpoint
    from plait.host import check
    from plait.records.run_folder import RunFolder

    said: list[str] = []
    assert find_checkpoint(check(config), RunFolder(run), said.append).finished
    flip(run / "checkpoints/step-6/__1_0.distcp")
    found = find_checkpoint(check(config), RunFolder(run), said.append)
    assert (found.step, found.finished) == (4, False)
    assert f"skipping the checkpoint {run}/checkpoints/step-6: its file __1_0.distcp {CHANGED}" in said


# Without a run around it


def model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = torch.nn.Linear(50, 40)
    return net, torch.optim.AdamW(net.parameters())


def test_nothing_of_a_damaged_one_stays_not_even_state_that_the_older_one_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 0 was saved before the optimizer had any state."""
    net, optimizer = model(0)
    saver = Saver(Store(tmp_path), "sync")
    saver.save(canonical_state(net, optimizer)[0], 0)
    first = net.weight.detach().clone()
    net(torch.ones(50)).sum().backward()
    optimizer.step()
    saver.save(canonical_state(net, optimizer)[0], 1)
    last = max((tmp_path / "step-1").glob("*.distcp"), key=os.path.getsize)
    content = bytearray(last.read_bytes())
    content[-2000] ^= 1  # among the last parts: the others are loaded first
    last.write_bytes(content)
    resumed, its_optimizer = model(1)
    path = load_latest(Store(tmp_path), *canonical_state(resumed, its_optimizer))
    assert path == tmp_path / "step-0"
    assert capsys.readouterr().out == f"skipping the checkpoint {tmp_path}/step-1: its file {last.name} {CHANGED}\n"
    assert torch.equal(resumed.weight, first)
    assert not its_optimizer.state
    assert load_latest(Store(tmp_path / "none"), *canonical_state(resumed, its_optimizer)) is None
