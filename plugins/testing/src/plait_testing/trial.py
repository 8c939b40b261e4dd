"""One trial: a small model trained for a few steps under some strategies, and its complete result."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import plait
from plait import IGNORE, Applied, Batch, Compile, Loss, Observer, Precision, Remat, Schedule, canonical
from plait.host import make_optimizer, plugins
from plait_testing.models import MODELS, VOCAB

SAMPLES, SEQ_LEN = 8, 16
ZERO = 1e-12  # of all gradients of a rank: what is below comes from rounding in float64


def made(strategies: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> instance, of the installed strategies of these names and options."""
    return plugins.create_all(strategies)


@attrs.frozen
class Trial:
    """What is tried; the same whatever the layout.

    model:    "llama3", "tied", "odd", "qk_norm", "mla" or "moe", or a function that builds one on the current device.
    steps:    of the optimizer, with a new global batch each.
    dtype:    of everything, or "mixed": stored and reduced in float32, computed in bfloat16.
    micro:    number of micro-batches into which a rank divides its part.
    remat:    `remat.mode`.
    budget:   `remat.budget`.
    compile:  the backend of `compile`, None: off.
    chunks:   `loss.chunks`.
    loss:     `loss.function`: name of a loss -> its options, or the loss itself.
    documents: whether rows hold packed documents, with their positions.
    max_norm: gradients are clipped to it.
    seed:     of the initial parameters.
    last:     whether the gradients of the last step are kept too.
    trains_with: the optimizer, as in `conf/optimizer`. None: AdamW, at a rate of 0.01.
    """

    model: str | Callable[[], nn.Module] = "llama3"
    steps: int = 3
    dtype: str = "float64"
    micro: int = 1
    remat: str = "none"
    budget: float = 0.5
    compile: str | None = None
    chunks: int = 1
    loss: Mapping[str, Any] = attrs.Factory(dict)
    documents: bool = False
    max_norm: float = 1.0
    seed: int = 0
    last: bool = False
    trains_with: Mapping[str, Any] | None = None

    def build(self) -> nn.Module:
        """The model, on the meta device."""
        with torch.device("meta"):
            return MODELS[self.model]() if isinstance(self.model, str) else self.model()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of global batch `step`."""
        return batch(step)

    def positions(self, tokens: Tensor, step: int) -> Tensor | None:
        """The positions of that batch's rows, (B, T); None: each row is one document."""
        return documents(tokens) if self.documents else None

    def computing(self) -> AbstractContextManager[Any]:
        """A context that is active during forward and backward; for subclasses."""
        return nullcontext()

    def precision(self) -> Precision:
        """The dtypes that `dtype` stands for."""
        if self.dtype == "mixed":
            return Precision("float32", "bfloat16", "float32")
        return Precision(self.dtype, self.dtype, self.dtype)

    def optimizer(self, groups: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer over these parameters, or groups of them: what `Applied.optimizer` calls."""
        if self.trains_with is None:
            return torch.optim.AdamW(groups, lr=1e-2)
        return make_optimizer(self.trains_with, groups, schedule=Schedule())

    def apply(self, strategies: Mapping[str, Mapping[str, Any]], extra: Iterable[Any] = ()) -> Applied:
        """The model under the installed strategies of these names and options, and under the instances `extra`."""
        model = self.build()
        return plait.apply(
            model,
            model.spec(),  # type: ignore[operator]
            [*made(strategies).values(), *extra],
            seed=self.seed,
            precision=self.precision(),
            remat=Remat(self.remat, self.budget),
            compile=Compile(enabled=self.compile is not None, backend=self.compile or "eager"),
            loss=Loss(self.chunks, dict(self.loss)),
            seq_len=SEQ_LEN,
        )


@attrs.frozen
class TrialResult:
    """What a trial did on one rank. Tensors are whole ones on the CPU, by FQN.

    initial, final: parameters before the first step, and after the last.
    gradients: of the first step, before clipping.
    losses, norms: of every step.
    placements: FQN -> the parameter's placement, in words.
    buffers: after the last step, such as experts' balance.
    last: gradients of the last step, if the trial keeps them; before: parameters before that step.
    trained: FQNs of the parameters whose gradient was not zero in every step, on any rank.
    """

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    final: dict[str, Tensor]
    placements: dict[str, str] = attrs.Factory(dict)
    buffers: dict[str, Tensor] = attrs.Factory(dict)
    last: dict[str, Tensor] = attrs.Factory(dict)
    before: dict[str, Tensor] = attrs.Factory(dict)
    trained: tuple[str, ...] = ()


def train(
    trial: Trial, strategies: Mapping[str, Mapping[str, Any]] | None = None, extra: Iterable[Any] = ()
) -> TrialResult:
    """What training on all ranks that call this together does. strategies: name -> options of installed ones. extra:
    instances beside them."""
    applied = trial.apply(strategies or {}, extra)
    initial = held(applied)
    placements = held(applied, _lies)
    optimizer = applied.optimizer(trial.optimizer)
    losses, norms, seen = [], [], Gradients(applied, {0, trial.steps - 1} if trial.last else {0})
    for step in range(trial.steps):
        loss, norm = take_step(applied, optimizer, trial, step, seen)
        losses.append(loss)
        norms.append(norm)
    gradients, last = seen.of_step.get(0, {}), seen.of_step.get(trial.steps - 1, {}) if trial.last else {}
    buffers = of_all_stages(applied, {canonical(n): full(b) for part in applied.parts for n, b in part.named_buffers()})
    return TrialResult(
        initial, gradients, losses, norms, held(applied), placements, buffers, last, seen.before, seen.trained()
    )


class Gradients(Observer):
    """Keeps the whole gradients of the steps `numbers` (from 0), before they are clipped: `of_step[number]`, by FQN;
    `before`, the parameters then; and which parameters had any gradient, in all steps."""

    def __init__(self, applied: Applied, numbers: Container[int]) -> None:
        self.applied, self.numbers = applied, numbers
        self.of_step: dict[int, dict[str, Tensor]] = {}
        self.before: dict[str, Tensor] = {}
        self._trained: set[str] = set()

    def clip(self) -> None:
        norms = {name: float(_own(p.grad).norm()) for name, p in self._with_names() if p.grad is not None}
        floor = ZERO * math.hypot(*norms.values())
        self._trained |= {name for name, norm in norms.items() if not norm <= floor}
        if self.applied.steps in self.numbers:
            self.of_step[self.applied.steps] = _gradients(self.applied)
            if self.applied.steps:
                self.before = held(self.applied)

    def trained(self) -> tuple[str, ...]:
        """The parameters that had a gradient other than zero in any step, on any rank. Called by all ranks."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self._trained)
        return tuple(sorted(set().union(*every)))

    def _with_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.applied.parts:
            for name, param in part.named_parameters():
                yield canonical(name), param


def take_step(
    applied: Applied, optimizer: torch.optim.Optimizer, trial: Trial, step: int, observer: Observer | None = None
) -> tuple[float, float]:
    """Train on global batch `step`; returns (the loss over all tokens, the norm before clipping)."""
    batch, total = share(applied, trial, step)
    rows = -(-len(batch.tokens) // trial.micro)
    known = lambda dealt: lambda: total  # noqa: E731 - all ranks know the whole batch
    with trial.computing():
        done = applied.step(batch, optimizer, known, observer, rows=rows, max_norm=trial.max_norm)
    return _over_ranks(applied, done.loss), float(done.norm)


def forward_backward(applied: Applied, trial: Trial, step: int) -> float:
    """Gradients of global batch `step`, divided into this rank's micro-batches; returns the loss over all tokens."""
    batch, total = share(applied, trial, step)
    parts = applied.deal(batch).split(-(-len(batch.tokens) // trial.micro))
    with trial.computing():
        summed = applied.forward_backward(parts, total)
    return _over_ranks(applied, summed / total)


def share(applied: Applied, trial: Trial, step: int) -> tuple[Batch, int]:
    """(this data rank's rows of global batch `step`, on its device; what the loss of the whole batch is divided by)."""
    index, count = applied.mesh.rank_and_size("batch")
    tokens, labels = (tensor.to(applied.device) for tensor in trial.batch(step))
    whole = Batch(tokens, labels, trial.positions(tokens, step))
    total = whole.valid()
    if hasattr(applied.loss, "units"):  # a loss of whole rows
        loss: Any = applied.loss
        rows = torch.arange(len(tokens))
        whole, total = attrs.evolve(whole, marks=1 - rows % 2, texts=rows), len(tokens) // loss.group
        loss.reference = reference(len(tokens))
    return whole.split(len(tokens) // count)[index], total


def reference(rows: int) -> Tensor:
    """(rows,) float64, log-probabilities of the rows of a batch, for a loss that compares with a reference."""
    return -60 - 20 * torch.rand(rows, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def _over_ranks(applied: Applied, part: Tensor) -> float:
    part = part.cpu() if applied.mesh.is_dp_leader() else torch.zeros_like(part, device="cpu")
    dist.all_reduce(part)
    return float(part)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """(tokens, labels) of global batch `step`: 8 samples of 16 tokens; some labels are ignored."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (SAMPLES, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[::3, :5] = IGNORE  # ranks hold unequal counts of valid tokens, as in real data
    return tokens[:, :-1], labels


def documents(tokens: Tensor) -> Tensor:
    """Positions of packed documents, (B, T), T at least 2: of several lengths, other ones in other rows."""
    first, length = torch.zeros_like(tokens, dtype=torch.bool), tokens.shape[1]
    first[:, 0] = first[::2, length // 3] = first[1::3, length // 2 + 1] = first[:, length - 2] = True
    place = torch.arange(length, device=tokens.device).expand_as(tokens)
    return place - torch.where(first, place, 0).cummax(1).values


def whole(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> every parameter of `model` as a whole tensor on the CPU; collective if they are sharded."""
    return {canonical(name): full(p) for name, p in model.named_parameters()}


def held(applied: Applied, what: Callable[[nn.Parameter], Any] | None = None) -> dict[str, Any]:
    """FQN -> `what` of every parameter of the model, those of other stages too; by default its value as a whole tensor
    on the CPU. Collective."""
    found = {canonical(n): (what or full)(p) for part in applied.parts for n, p in part.named_parameters()}
    return of_all_stages(applied, found)


def of_all_stages(applied: Applied, own: Mapping[str, Any]) -> dict[str, Any]:
    """`own`, by FQN, and the entries of the ranks with other stages; those of a whole model in its order. Collective
    over these ranks."""
    if applied.whole is None:
        return dict(own)
    found = dict(own)
    for axis in applied.mesh.layout.dense:
        if axis.splits == "layers":
            answers: list[Any] = [None] * axis.degree
            dist.all_gather_object(answers, found, group=applied.mesh[axis.name].get_group())
            found = {name: value for answer in answers for name, value in answer.items()}
    order = [*applied.whole.shapes, *applied.whole.ties]
    return {name: found[name] for name in dict.fromkeys([*order, *found]) if name in found}


def _gradients(applied: Applied) -> dict[str, Tensor]:
    found = held(applied, lambda p: None if p.grad is None else full(p.grad))
    return {name: grad for name, grad in found.items() if grad is not None}


def _own(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU; collective if it is sharded."""
    return plait.whole_tensor(tensor).detach().cpu().clone()


def _lies(param: Tensor) -> str:
    if not isinstance(param, DTensor):
        return "replicated (a plain tensor)"
    names = param.device_mesh.mesh_dim_names or ()
    return ", ".join(f"{placement} over {name}" for placement, name in zip(param.placements, names, strict=False))
