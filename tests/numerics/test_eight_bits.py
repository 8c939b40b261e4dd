"""States in 8 bits: near to what they stand for, right in the mean, and the same codes whoever holds which part.

The bound: a value is off by an eighth of itself and 2^-18 of its row's scale (2^-33 in a row without negative
elements), at most. That is the distance of neighbours, so rounding alone reaches it.
"""

import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plait.train.eight_bits import decoded, encoded
from plait.train.optimizer import make_optimizer
from plait.train.rounding import Rounding, random_digits

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test


def drawn(*shape, positive=False, seed=0):
    """Sizes over 12 powers of ten, as moments have."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator) * 10 ** (torch.rand(*shape, generator=generator) * 6 - 6)
    return values.square() if positive else values


def digits(value, key="key"):
    return random_digits([torch.arange(size) for size in value.shape], key)


@pytest.mark.parametrize("positive", [False, True])
def test_a_value_is_off_by_an_eighth_at_most(positive):
    value = drawn(50, 300, positive=positive)
    codes, scales = encoded(value, digits(value))
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, value.shape, (50, 1))
    least = 2.0 ** (-33 if positive else -18) * scales.abs()
    off = (decoded(codes, scales) - value).abs()
    assert bool((off <= (value.abs() / 8 + least) * (1 + 1e-6)).all())
    if positive:
        assert bool((decoded(codes, scales) > 0).all()), "a step divides by its root"


def test_the_mean_is_right_and_what_does_not_change_keeps_its_code():
    value = drawn(4, 200)
    values = [decoded(*encoded(value, digits(value, str(number)))).double() for number in range(500)]
    mean, spread = torch.stack(values).mean(0), torch.stack(values).std(0)
    assert bool(((mean - value).abs() <= 5 * spread / 500**0.5 + 1e-3 * value.abs()).all())
    kept = decoded(*encoded(values[0].float(), digits(value, "other")))
    same = (kept - values[0]).abs() <= 1e-6 * value.abs().amax(-1, keepdim=True)
    assert float(same.double().mean()) > 0.99


def test_what_is_not_finite_is_not_hidden():
    value = torch.tensor([[1.0, float("nan"), 2.0], [float("inf"), -1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 2.0, -4.0]])
    back = decoded(*encoded(value, digits(value)))
    assert not bool(back[:2].isfinite().any())
    assert torch.equal(back[2], value[2])
    assert back[3].tolist() == pytest.approx([1.0, 2.0, -4.0], rel=0.125)
    assert decoded(*encoded(value[:, :0], digits(value)[:, :0])).shape == (4, 0)


def stepped(dim=None):
    """(codes and scales of both moments that this rank holds, as whole tensors) after two steps; the parameter lies
    whole, or in uneven shards of `dim`."""
    values, mesh = drawn(7, 5), None if dim is None else init_device_mesh("cpu", (2,))

    def place(value):
        return value.clone() if mesh is None else distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)

    param = nn.Parameter(place(values))
    group = {"params": [param], "names": ["w"], "logical": [("a", "b")], "block": [None], "mesh": mesh}
    optimizer = make_optimizer(
        {"_target_": "torch.optim.AdamW", "lr": 1e-3}, [group], rounding=Rounding("8bit", False, 0)
    )
    for number in range(2):
        param.grad = place(drawn(7, 5, seed=number))
        optimizer.step()
    kept = {key: value for key, value in optimizer.state[param].items() if key != "step"}
    return {key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in kept.items()}


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_rows_and_of_columns_have_the_codes_of_the_whole(plait_ranks, dim):
    one = stepped()
    assert one.keys() == {f"{name}{end}" for name in ("exp_avg", "exp_avg_sq") for end in ("_8bit", "_8bit_scale")}
    for found in plait_ranks.run(stepped, dim, world=2):
        assert all(torch.equal(found[key], one[key]) for key in one)


@pytest.mark.slow
def test_a_checkpoint_with_states_in_another_form_is_refused(plait_project):
    run = ("model=llama3_debug", "model.n_layers=1", "model.dim=32", "train.steps=2", "train.seq_len=16")
    more = ("train.local_batch_size=1", "validation.interval=0", "metrics.tensorboard=false", "run.name=a")
    assert plait_project("train", *run, *more, "precision.optimizer=8bit", ranks=1).code == 0
    done = plait_project("train", *run, *more, "train.steps=3")
    assert (done.code, done.error.key, done.error.fits) == (1, "precision.optimizer", ("8bit",)), done.err
    again = plait_project("train", *run, *more, "precision.optimizer=8bit", "train.steps=3", ranks=1)
    assert again.code == 0, again.err
    assert [row["step"] for row in plait_project.rows("a")] == [1, 2, 3]
