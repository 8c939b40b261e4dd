"""Files whose tensors are parts of parameters: written, read by ranks that hold some of a parameter, and refused."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from plait import WeightPart
from plait.checkpoint.export import export
from plait.checkpoint.init_from import check_weights, read_weights
from plait.contract.errors import PlaitError
from plait.contract.weight_part import parts_by_fqn
from plait.testing import raises_about

X, F, D = 4, 6, 8
SHAPES = {"up": (X, 2 * F, D), "down": (X, D, F), "norm": (D,)}


def own():
    generator = torch.Generator().manual_seed(0)
    return {fqn: torch.randn(shape, generator=generator) for fqn, shape in SHAPES.items()}


def parts():
    """Of each expert two matrices on top of each other in `up`, and one that lies the other way in the files."""
    found = {"scale": WeightPart.whole("norm", (D,))}
    for x in range(X):
        found[f"{x}.gate"] = WeightPart("up", (x, 0, 0), (1, F, D), (1, 2))
        found[f"{x}.up"] = WeightPart("up", (x, F, 0), (1, F, D), (1, 2))
        found[f"{x}.down"] = WeightPart("down", (x, 0, 0), (1, D, F), (2, 1))
    return found


def theirs():
    """What files hold, without any of the code under test."""
    held = {"scale": own()["norm"]}
    for x in range(X):
        held[f"{x}.gate"], held[f"{x}.up"] = own()["up"][x, :F].clone(), own()["up"][x, F:].clone()
        held[f"{x}.down"] = own()["down"][x].T.contiguous()
    return held


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("most", [5e9, 4 * F * D])  # one file; files that end within a parameter
def test_files_have_the_parts(tmp_path, most):
    export(own(), tmp_path / "out", is_writer=True, max_shard_bytes=most, parts=parts())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == (1 if most > 1e9 else 3 * X + 1)
    assert same({name: t for file in files for name, t in load_file(file).items()}, theirs())
    back = {fqn: torch.full(shape, torch.nan) for fqn, shape in SHAPES.items()}
    check_weights(tmp_path / "out", SHAPES, parts=parts())
    read_weights(tmp_path / "out", back, parts=parts())
    assert same(back, own())


def divided(fqn, whole):
    """By experts and rows; by the rows' halves, in which ranks of the other axis hold a part of each; by columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    placements = {
        "up": [_StridedShard(1, split_factor=2), Shard(1)],
        "down": [Shard(0), Shard(2)],
        "norm": [Replicate(), Shard(0)],
    }[fqn]
    return distribute_tensor(whole, mesh, placements)


def read_and_written(folder, out):
    state = {fqn: divided(fqn, torch.zeros(shape)) for fqn, shape in SHAPES.items()}
    read_weights(folder, state, parts=parts())
    wanted = {fqn: divided(fqn, tensor) for fqn, tensor in own().items()}
    export(state, out, is_writer=dist.get_rank() == 0, parts=parts())
    assert all(isinstance(t, DTensor) and t.to_local().numel() < t.numel() for t in state.values())
    return [fqn for fqn in SHAPES if not torch.equal(state[fqn].to_local(), wanted[fqn].to_local())]


def test_each_rank_reads_its_own(plait_ranks, tmp_path):
    save_file(theirs(), tmp_path / "model.safetensors")
    assert plait_ranks.run(read_and_written, tmp_path, tmp_path / "out", world=4) == [[]] * 4
    assert same(load_file(tmp_path / "out" / "model.safetensors"), theirs())


def test_a_tied_parameter_may_have_the_name_of_either_of_its_parts(tmp_path):
    known = {**parts(), "last": WeightPart.whole("norm_again", (D,))}
    ties = {"norm_again": "norm"}
    for number, names in enumerate((["scale"], ["last"], ["scale", "last"])):
        file = tmp_path / f"{number}.safetensors"
        save_file({n: t for n, t in theirs().items() if n != "scale"} | {n: own()["norm"] + 0 for n in names}, file)
        back = {fqn: torch.zeros(shape) for fqn, shape in SHAPES.items()}
        read_weights(file, back, ties, parts=known)
        assert same(back, own()), names


def read_tied(file):
    state = {"up": divided("up", torch.zeros(SHAPES["up"]))}
    read_weights(file, state, {"up_again": "up"}, parts={n: p for n, p in parts().items() if p.fqn == "up"})
    return state["up"].to_local().numel()


@pytest.mark.parametrize("same_values", [True, False])
def test_ranks_compare_their_shares_of_a_parameter_that_files_hold_twice(same_values, plait_ranks, tmp_path):
    file, up = tmp_path / "a.safetensors", {n: p for n, p in parts().items() if p.fqn == "up"}
    again = own()["up"].clone()
    again[-1, -1, -1] += 0 if same_values else 1
    save_file({name: part.of(own()["up"]).contiguous() for name, part in up.items()} | {"up_again": again}, file)
    if same_values:
        check_weights(file, {"up": SHAPES["up"]}, {"up_again": "up"}, up)
        assert sum(plait_ranks.run(read_tied, file, world=4)) == again.numel()
        return
    with pytest.raises(PlaitError, match="'up_again' differ in"):
        check_weights(file, {"up": SHAPES["up"]}, {"up_again": "up"}, up)
    with pytest.raises(Exception, match="'up_again' differ in"):  # of the one rank that holds the last row
        plait_ranks.run(read_tied, file, world=4)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ({"2.up": None}, "lacks '2.up'"),
        ({"2.up": torch.zeros(F, D + 1)}, "'2.up' has shape"),
        ({"4.up": torch.zeros(F, D)}, "has '4.up'"),
    ],
)
def test_files_of_another_model_name_the_tensor(tmp_path, file, said):
    held = {name: tensor for name, tensor in {**theirs(), **file}.items() if tensor is not None}
    save_file(held, tmp_path / "other.safetensors")
    with pytest.raises(Exception, match=said):
        check_weights(tmp_path / "other.safetensors", SHAPES, parts=parts())


def test_a_parameter_that_its_parts_do_not_cover_is_named():
    known = parts()
    del known["3.gate"]
    with raises_about("weight_parts", "up", f"{2 * X * F * D} elements"):
        parts_by_fqn(SHAPES, known)
