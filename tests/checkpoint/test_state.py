"""What a checkpoint holds of a model and its optimizer; one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader

from plait.checkpoint.load import load
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.contract.errors import PlaitError
from plait.parallel.state import canonical_state, is_absent, shapes, tied_names, weights


class Counting(torch.optim.Optimizer):
    """An optimizer as strangers write them: numbers in its state, and attributes of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = state.get("decay", 1.0) * 0.9
                p.sub_(p.grad, alpha=group["lr"] * self.scale * state["decay"] / state["count"])


class Odd(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"scale": 1}


def model(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4, bias=bias), nn.LayerNorm(4), nn.Linear(4, 7, bias=False))
    net[3].weight = net[0].weight
    net.register_buffer("seen", torch.zeros(3))
    net.register_buffer("scratch", torch.zeros(3), persistent=False)
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(step))
        net(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, state: dict[str, Tensor], step: int = 1) -> Path:
    Saver(Store(folder), "sync").save(state, step)
    return Store(folder).path_of(step)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "adamw amsgrad eps=0": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, eps=0.0),
    "adam, rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "a stranger's": Counting,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_goes_on_bitwise(tmp_path: Path, name: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    train(net, optimizer, range(3))
    path = save(tmp_path, canonical_state(net, optimizer)[0])
    resumed = model()
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    load(path, *canonical_state(resumed, resumed_optimizer))
    assert equal(net, resumed)
    train(net, optimizer, range(3, 6))
    train(resumed, resumed_optimizer, range(3, 6))
    assert equal(net, resumed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_for_the_state_changes_no_step(tmp_path: Path, name: str) -> None:
    """Before the first step, nothing of an optimizer is saved, made or counted; afterwards it is as if never asked."""
    net, plain = model(), model()
    optimizer, plain_optimizer = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](plain.parameters())
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    calls: list[int] = []
    before = copy.deepcopy(optimizer.state_dict())
    state = canonical_state(net, optimizer)[0]
    fresh = [key for key, tensor in state.items() if is_absent(tensor)]
    path = save(tmp_path, state, step=0)
    load(path, *canonical_state(net, optimizer))
    assert not set(fresh) & set(FileSystemReader(path).read_metadata().state_dict_metadata)
    assert str(optimizer.state_dict()) == str(before)
    assert calls == []
    assert all(p.grad is None for p in net.parameters())
    train(net, optimizer, range(3))
    train(plain, plain_optimizer, range(3))
    assert equal(net, plain)


def test_state_is_saved_for_parameters_that_have_it(tmp_path: Path) -> None:
    """A parameter that no gradient has reached yet has none, before as after."""
    net, resumed = model(), model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net[1].weight.grad = torch.ones(4, 4)
    optimizer.step()
    path = save(tmp_path, canonical_state(net, optimizer)[0])
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    load(path, *canonical_state(resumed, resumed_optimizer))
    assert list(resumed_optimizer.state) == [resumed[1].weight]
    assert resumed_optimizer.state[resumed[1].weight]["step"] == 1


def test_names(tmp_path: Path) -> None:
    net = model()
    net[1] = checkpoint_wrapper(torch.compile(net[1], backend="eager"))
    state, _ = canonical_state(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    model_keys = ["seen", "0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert list(weights(state)) == model_keys
    assert [key for key in state if key not in {f"model.{k}" for k in model_keys}] == [
        f"optimizer.{key}.momentum_buffer" for key in model_keys[1:]
    ]
    assert tied_names(net) == {"3.weight": "0.weight"}
    assert shapes(net) == {key: tuple(tensor.shape) for key, tensor in weights(state).items()}
    assert state["model.0.weight"].data_ptr() == net[0].weight.data_ptr()
    assert not state["model.0.weight"].requires_grad


def test_what_cannot_be_saved_is_refused() -> None:
    net = model()
    lists = torch.optim.SGD(net.parameters(), lr=0.1)
    lists.state[net[1].weight]["old_dirs"] = [torch.zeros(1)]
    with pytest.raises(PlaitError, match=r"SGD keeps 'old_dirs' of '1\.weight' as a list, which cannot be saved"):
        canonical_state(net, lists)
    net[2].register_module("odd", Odd())
    with pytest.raises(PlaitError, match=r"'2\.odd\._extra_state' of the model is not a parameter or buffer"):
        canonical_state(net)


def test_errors_of_loading(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(1))
    path = save(tmp_path, canonical_state(net, optimizer)[0])
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(
        PlaitError, match=r"has no 'model\.1\.wieght'; did you mean 'model\.1\.weight'.*it has \d+ entries"
    ):
        load(path, {"model.1.bias": torch.zeros(4), "model.1.wieght": torch.zeros(4, 4)})
    with pytest.raises(PlaitError, match=r"has 'model\.1\.bias' in shape \(4,\), and this run needs \(5,\)"):
        load(path, {"model.1.bias": torch.zeros(5)})
    other = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(PlaitError, match=r"another optimizer, .*: for '0\.weight' it has exp_avg, .* momentum_buffer"):
        load(path, *canonical_state(net, other))
    with pytest.raises(PlaitError, match="is not a checkpoint: it has no manifest"):
        load(tmp_path, canonical_state(net)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_weights_load_without_the_optimizers_files_being_asked_for(tmp_path: Path) -> None:
    net, other = model(), model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer, range(2))
    path = save(tmp_path, canonical_state(net, optimizer)[0])
    load(path, canonical_state(other)[0])
    assert equal(net, other)


def test_storage_may_be_of_another_dtype(tmp_path: Path) -> None:
    net, half, whole = model(), model().bfloat16(), model()
    path = save(tmp_path, canonical_state(half)[0])
    assert Store.read(path).parameters["1.weight"] == [[4, 4], "bfloat16"]
    load(path, canonical_state(whole)[0])
    assert torch.equal(whole[1].weight, net[1].weight.bfloat16().float())


def test_saving_after_a_run_went_back_keeps_what_it_went_back_from(tmp_path: Path) -> None:
    """Later checkpoints are replaced when the run gets there; until then none is removed, and none counts."""
    saver = Saver(Store(tmp_path), "sync", keep=2)
    for step in (10, 20, 5, 6, 7):
        saver.save(canonical_state(model(), None)[0], step)
    assert [path.name for path in Store(tmp_path).complete()] == ["step-6", "step-7", "step-10", "step-20"]
