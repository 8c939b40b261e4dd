"""What one layout saves any other loads, bit for bit: weights, optimizer, at any world size."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from plait.checkpoint.export import export
from plait.checkpoint.init_from import read_weights
from plait.checkpoint.load import load
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.contract.errors import PlaitError
from plait.parallel.state import canonical_state, weights
from plait_testing.pool import Pool

WORLDS = {"plain": 1, "sharded 2": 2, "sharded 4": 4, "hybrid": 4, "two axes": 4}
LAYOUTS = list(WORLDS)


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Rows that do not divide, fewer rows than ranks, one dim, a tie, a buffer; in bfloat16 too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 7), nn.Linear(7, 1), nn.Linear(6, 11, bias=False))
    model[3].weight = model[0].weight
    model[1].bfloat16()
    model.register_buffer("seen", torch.arange(3.0))
    world = WORLDS[layout]
    if layout.startswith("sharded"):
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    if layout == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    if layout == "two axes":  # both divide dim 0 of one weight, another weight has one dim each
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for module, name, dim in [(model[0], "weight", 0), (model[1], "weight", 1), (model[2], "weight", 1)]:
            sharded = distribute_tensor(getattr(module, name).detach(), mesh["tensor"], [Shard(dim)])
            setattr(module, name, nn.Parameter(sharded))
        model[3].weight = model[0].weight
        fully_shard(model, mesh=mesh["data"])
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in model.parameters():
        groups.setdefault((p.dtype, getattr(p, "device_mesh", None)), []).append(p)
    return model, torch.optim.AdamW([{"params": group} for group in groups.values()], lr=0.1, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Gradients that every layout draws alike, so that all layouts stay bitwise equal."""
    for step in steps:
        for i, p in enumerate(model.parameters()):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(p.dtype)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()
        model.seen.add_(1)


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for key, t in state.items()}


def run_and_save(layout: str, folder: str, mode: str) -> dict[str, Tensor]:
    model, optimizer = build(layout)
    train(model, optimizer, range(3))
    saver = Saver(Store(folder), mode)
    saver.save(canonical_state(model, optimizer)[0], 3, data={"layout": layout})
    saver.wait()
    return whole(canonical_state(model, optimizer)[0])


def resume_all(layout: str, folders: list[str]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """After loading, and two steps later, for each of the folders."""
    states = []
    for folder in folders:
        model, optimizer = build(layout)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load(Store(folder).path_of(3), *canonical_state(model, optimizer))
        loaded = whole(canonical_state(model, optimizer)[0])
        train(model, optimizer, range(3, 5))
        states.append((loaded, whole(canonical_state(model, optimizer)[0])))
    return states


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return sorted(set(a) ^ set(b)) or [k for k in a if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])]


@pytest.fixture(scope="module")
def saved(plait_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Layout -> folder of a store with step 3, all of the same run."""
    folders = {layout: tmp_path_factory.mktemp(layout.replace(" ", "-")) for layout in LAYOUTS}
    reference: dict[str, Tensor] = {}
    for i, (layout, folder) in enumerate(folders.items()):
        mode = ("async", "sync")[i % 2]
        for state in plait_ranks.run(run_and_save, layout, str(folder), mode, world=WORLDS[layout]):
            reference = reference or state
            assert differences(state, reference) == []
    assert any(key.endswith("exp_avg_sq") for key in reference)
    return folders


def test_a_checkpoint_says_nothing_of_the_layout(saved: dict[str, Path]) -> None:
    manifests = [Store.read(Store(folder).latest()) for folder in saved.values()]
    assert [m.data for m in manifests] == [{"layout": layout} for layout in LAYOUTS]
    assert all(m.parameters == manifests[0].parameters for m in manifests)
    assert manifests[0].parameters["1.weight"] == [[7, 6], "bfloat16"]
    written = (".metadata", "__0_0.distcp", "__1_0.distcp")
    assert set(manifests[1].files) == {name + end for name in written for end in ("", ".pieces")}


@pytest.mark.parametrize(
    "layout", [x if x in ("plain", "two axes") else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]
)
def test_every_layout_loads_what_every_other_saved(plait_ranks: Pool, saved: dict[str, Path], layout: str) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, range(3))
    expected = whole(canonical_state(model, optimizer)[0])
    train(model, optimizer, range(3, 5))
    later = whole(canonical_state(model, optimizer)[0])
    folders = [str(folder) for folder in saved.values()]
    for states in plait_ranks.run(resume_all, layout, folders, world=WORLDS[layout]):
        for (loaded, resumed), source in zip(states, LAYOUTS, strict=True):
            assert differences(loaded, expected) == [], source
            assert differences(resumed, later) == [], source


def change_while_saving(folder: str) -> tuple[bool, list[str]]:
    model, optimizer = build("sharded 2")
    train(model, optimizer, range(3))
    before = whole(canonical_state(model, optimizer)[0])
    saver, go = Saver(Store(folder), "async"), threading.Event()
    saver._thread.submit(go.wait)  # nothing is written before the parameters have changed
    saver.save(canonical_state(model, optimizer)[0], 3)
    train(model, optimizer, range(3, 5))
    changed = differences(whole(canonical_state(model, optimizer)[0]), before) != []
    go.set()
    saver.wait()
    state, after = canonical_state(model, optimizer)
    load(Store(folder).path_of(3), state, after)
    return changed, differences(whole(state), before)


def test_an_async_save_holds_what_was_there_when_it_began(plait_ranks: Pool, tmp_path: Path) -> None:
    assert plait_ranks.run(change_while_saving, str(tmp_path), world=2) == [(True, [])] * 2


def train_during_saves(folder: str) -> list[str]:
    """Collectives of training and of saving at the same time, on the same ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 3))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = Saver(Store(folder), "async", keep=2)
    for step in range(1, 7):
        for _ in range(10):
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        saver.save(canonical_state(model, optimizer)[0], step)
    saver.wait()
    dist.barrier()
    return sorted(p.name for p in Path(folder).iterdir())


def test_training_goes_on_while_a_thread_saves(plait_ranks: Pool, tmp_path: Path) -> None:
    assert plait_ranks.run(train_during_saves, str(tmp_path), world=2) == [["step-5", "step-6"]] * 2


def save_after_a_forward(folder: str) -> list[str]:
    """After a forward pass without a backward, parameters are still gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model(torch.ones(2, 4))
    gathered = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    state, _ = canonical_state(model, optimizer)
    Saver(Store(folder), "sync").save(state, 1)
    assert gathered, "this no longer tests anything"
    return [key for key, t in state.items() if not isinstance(t, DTensor) and not key.endswith("step")]


def test_parameters_are_brought_to_rest_before_saving(plait_ranks: Pool, tmp_path: Path) -> None:
    assert plait_ranks.run(save_after_a_forward, str(tmp_path), world=2) == [[], []]


class Full(Store):
    def commit(self, whole: Path, manifest: Any) -> Path:
        raise OSError("no space left")


def fail_on_one_rank(folder: str, mode: str, rank: int) -> tuple[str, list[str]]:
    """Rank 1 while it writes, or rank 0 while it completes what all have written."""
    model, optimizer = build("sharded 2")
    good, no_folder = Store(Path(folder, "good")), Path(folder, "file")
    no_folder.write_text("")
    saver = Saver(good, mode)
    state = canonical_state(model, optimizer)[0]
    saver.save(state, 1)
    saver.wait()
    if dist.get_rank() == rank:
        saver.store = Store(no_folder) if rank else Full(good.folder)
    message = ""
    try:
        saver.save(state, 2)
        saver.save(state, 3)
    except PlaitError as error:
        message = str(error)
    saver.store = good
    saver.save(state, 4)
    saver.wait()
    dist.barrier()
    return message, sorted(p.name for p in good.folder.iterdir())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("rank", "reason"), [(0, "no space left"), (1, r"\S+: a file is where a folder should be")])
def test_a_failure_on_one_rank_is_told_on_all(
    plait_ranks: Pool, tmp_path: Path, mode: str, rank: int, reason: str
) -> None:
    expected = rf"the checkpoint of step 2 could not be saved: {reason} \(rank {rank}\)"
    for message, found in plait_ranks.run(fail_on_one_rank, str(tmp_path), mode, rank, world=2):
        assert re.fullmatch(expected, message), message
        assert found == ["step-1", "step-4"]


def weights_in_and_out(layout: str, source: str, folder: str) -> list[str]:
    """Fill from safetensors, export; the parent compares the files. Then from a checkpoint of that layout."""
    model, _ = build(layout)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    own = weights(canonical_state(model)[0])
    read_weights(source, own, ties={"3.weight": "0.weight"})
    export(own, Path(folder, "export"), dist.get_rank() == 0)
    export(own, Path(folder, "many"), dist.get_rank() == 0, max_shard_bytes=100)
    Saver(Store(folder), "sync").save(canonical_state(model)[0], 0)
    other, _ = build(layout)
    before = whole(own)
    read_weights(Path(folder, "step-0"), weights(canonical_state(other)[0]))
    return differences(whole(weights(canonical_state(other)[0])), before)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_in_and_go_out_as_safetensors(plait_ranks: Pool, tmp_path: Path, layout: str) -> None:
    model, _ = build("plain")
    named = {"3.weight": torch.randn(11, 6), "seen": torch.ones(3)}  # the tie under its other name
    for name, p in list(model.named_parameters())[1:]:
        named[name] = torch.randn(p.shape, dtype=torch.float64)
    save_file(named, tmp_path / "in.safetensors")
    answers = plait_ranks.run(
        weights_in_and_out, layout, str(tmp_path / "in.safetensors"), str(tmp_path), world=WORLDS[layout]
    )
    assert answers == [[]] * WORLDS[layout]
    shapes = {"0.weight": named.pop("3.weight"), **named}
    expected = {k: v.bfloat16() if k.startswith("1.") else v.float() for k, v in shapes.items()}
    out = load_file(tmp_path / "export" / "model.safetensors")
    assert differences(out, expected) == []
    many = [load_file(f) for f in sorted((tmp_path / "many").glob("*.safetensors"))]
    assert len(many) == 4
    assert differences({k: v for part in many for k, v in part.items()}, expected) == []
    assert not list(tmp_path.glob("*.tmp"))
