"""What an author declares about a model, and how the suite's tests build it."""

import functools
import inspect
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import plait
from plait import ModelSpec, Precision
from plait.host import build_model, compose, simulated
from plait_testing.parity import BOUNDS, FLOOR

ROWS, LENGTH = 2, 16  # of the batches on which models are tested
DOCUMENTS = (5, 1, 10)  # lengths of the documents that are packed into a row
CLOSE = 1e-12  # of results in float64, as a part of the largest


class Subject:
    """Set these on a subclass.

    model:   its option, as after `model=`. A model without one overrides `build`.
    options: changes of its keys that make it small: at least 2 blocks; sequences of 16 tokens are tried.
    ties:    groups of names of parameters that must be one: `(("head.weight", "tokens.weight"),)`.
    constant: patterns of parameters whose gradient is zero by their mathematics, such as a bias of keys under softmax.
    graphs:  how many compiled graphs its blocks are; default: one for blocks that have the same parameters.
    counts:  option of `model=` -> its exact number of parameters, of every size that the package ships.
    """

    model: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    ties: ClassVar[tuple[tuple[str, ...], ...]] = ()
    constant: ClassVar[tuple[str, ...]] = ()
    graphs: ClassVar[int | None] = None
    counts: ClassVar[Mapping[str, int]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", list(self.counts))

    def build(self) -> nn.Module:
        """The small model, on the meta device."""
        return build_model({**_options(self.model), **self.options})[0]

    def described(self) -> tuple[nn.Module, ModelSpec]:
        """(the model on the meta device, its spec)."""
        model: Any = self.build()
        return model, model.spec()

    def real(self, noise: float = 0.05) -> tuple[Any, ModelSpec]:
        """(the model on the CPU in float64, filled by its spec, its spec). noise: what is added to each parameter, so
        that biases that begin with zero count."""
        model, spec = self.described()
        filled(model, spec, dtype="float64")
        generator = torch.Generator().manual_seed(1)
        for param in model.parameters():
            param.data += noise * torch.randn(param.shape, generator=generator, dtype=torch.float64)
        for router in spec.routers_of(model).values():
            if getattr(router, "balance_loss", 0):
                router.loss_scale.zero_()  # its gradient is not that of the loss
        return model, spec


def filled(model: nn.Module, spec: ModelSpec, seed: int = 0, dtype: str = "float32") -> None:
    """Gives a model on the meta device the values of a run in this dtype, on the CPU."""
    copy = deepcopy(model)  # a step of what is applied is the core's to make: it counts tokens, and divides losses
    with simulated(1):
        plait.apply(copy, spec, seed=seed, precision=Precision(dtype, dtype, dtype))
    for name, tensor in (*copy.named_parameters(remove_duplicate=False), *copy.named_buffers(remove_duplicate=False)):
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, tensor)


def shipped(option: str) -> tuple[nn.Module, ModelSpec]:
    """(the model of `model=OPTION` on the meta device, its spec)."""
    return build_model(_options(option))


@functools.cache
def _options(option: str) -> Mapping[str, Any]:
    return compose([f"model={option}"]).model


def takes_positions(model: nn.Module) -> bool:
    """Whether its forward has positions, which come with packed documents."""
    return "positions" in " ".join(inspect.signature(model.forward).parameters)


def needs_positions(model: nn.Module) -> None:
    if not takes_positions(model):
        pytest.skip("its forward takes no positions, so that no documents are packed into its rows")


def vocabulary(model: nn.Module) -> int:
    """The width of the logits of a model on meta, or on the CPU."""
    device = next(model.parameters()).device
    with torch.no_grad():
        return int(model(torch.zeros(1, 2, dtype=torch.int64, device=device)).shape[-1])


def tokens_for(model: nn.Module, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """(rows, length) tokens; always the same, and none that is padding, whose rows do not train."""
    generator = torch.Generator().manual_seed(0)
    padding = {getattr(module, "padding_idx", None) for module in model.modules()}
    ids = torch.tensor([token for token in range(vocabulary(model)) if token not in padding])
    return ids[torch.randint(len(ids), (rows, length), generator=generator)]


def positions_of(lengths: tuple[int, ...] = DOCUMENTS, rows: int = 1) -> Tensor:
    """(rows, sum of lengths) of packed documents."""
    return torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)


def loss_of(model: nn.Module, *inputs: Tensor) -> Tensor:
    """The mean cross entropy of each token by the token before it."""
    logits = model(*inputs)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, inputs[0][:, 1:].flatten())


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """FQN -> gradient of `loss` by each parameter that trains, zero if there is none."""
    named = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def unequal_gradients(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """The parameters whose gradients differ by more than the bound of docs/convergence.md."""
    floor = FLOOR * norm(want)
    bounds = {name: BOUNDS["float64"][0] * max(float(g.norm()), floor) for name, g in want.items()}
    return [name for name, bound in bounds.items() if not float((got[name] - want[name]).norm()) <= bound]


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Of all together."""
    return float(sum(t.double().square().sum() for t in tensors.values()) ** 0.5)


def alike(got: Tensor, want: Tensor, close: float = CLOSE) -> bool:
    """Whether they differ by at most `close` of the largest absolute value of `want`."""
    return got.shape == want.shape and bool((got - want).abs().max() <= close * want.abs().max().clamp(min=1e-30))


def inside(model: nn.Module, spec: ModelSpec, fields: tuple[str, ...]) -> set[nn.Parameter]:
    """The parameters of the modules that these fields of the spec name."""
    modules = [m for field in fields for m in getattr(spec, f"{field}_of")(model).values()]
    return {param for module in modules for param in module.parameters()}
