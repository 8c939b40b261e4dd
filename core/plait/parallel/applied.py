"""A model under its strategies: the training step, and what a run asks of them."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from plait.contract.batch import Batch
from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec
from plait.contract.observer import Observer, every_moment
from plait.contract.run import Run
from plait.ops.loss import cross_entropy_sum, loss_context
from plait.parallel.clip import total_norm
from plait.parallel.expert_balance import Balance
from plait.parallel.group import ParamGroup
from plait.parallel.mesh import Mesh
from plait.parallel.optimizer_groups import check_all_there, groups_of
from plait.parallel.own_state import own_entries
from plait.parallel.replica import Replica
from plait.parallel.state import canonical
from plait.parallel.step import Count, Stepped, counted_with
from plait.strategies.hooks import Hooks
from plait.strategies.registry import described

if TYPE_CHECKING:
    from plait.parallel.divided_layers import WholeModel


@attrs.define
class Applied:
    """A model under its strategies.

    parts: what this rank runs: the model, or its stages on this rank.
    mesh: the ranks along each axis.
    spec: what the model says about itself, with what strategies added.
    run: what strategies are told; `run.log` and `run.stop`.
    hooks: of the strategies.
    device: of this rank.
    balance: of the parts' experts.
    loss: (logits, labels) -> the loss summed over this rank's tokens: that of `loss.function`, else
    `cross_entropy_sum`, compiled if `compile.enabled`.
    whole: what is known of the model, if the parts of this rank are not all of it.
    steps: taken so far, those before a checkpoint too.
    own_optimizer: what `optimizer` returned, if a strategy made it.
    observers: of the run, by name, whose `state` checkpoints hold too. `step` tells its moments to its own observer.
    """

    parts: list[nn.Module]
    mesh: Mesh
    spec: ModelSpec
    run: Run
    hooks: Hooks
    device: torch.device
    balance: Balance
    loss: Callable[[Tensor, Any], Tensor] = cross_entropy_sum
    whole: "WholeModel | None" = None
    steps: int = 0
    own_optimizer: torch.optim.Optimizer | None = None
    _optimized: list[nn.Parameter] = attrs.field(factory=list, init=False)  # `parameters()` when `optimizer` was called
    observers: Mapping[str, Any] = attrs.field(factory=dict)

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once, tied ones too."""
        return list({id(p): p for part in self.parts for p in part.parameters()}.values())

    def groups(self) -> list[ParamGroup]:
        """The parameters for an optimizer, as torch's groups: dicts with `params`, the `names` and `logical` axes of
        each, their `block` and `units`, their `mesh` and its `holders`."""
        return groups_of(self.parts, self.spec, self.mesh.holders)

    def optimizer(self, make: Callable[[list[ParamGroup]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters: `make(groups)`, or what a strategy that owns its state makes of it.

        make: gets the groups of `groups()`, or of what a strategy updates in the parameters' place; torch's optimizers
        take them as they are.

        Called by all ranks, once; afterwards `step` takes no other optimizer if it is a strategy's. Raises PlaitError
        if that one leaves out a parameter.
        """
        groups, self._optimized = self.groups(), self.parameters()
        made = self.hooks.first("optimizer", groups=groups, make=make, mesh=self.mesh)
        if owners := self.hooks.implemented("optimizer"):
            check_all_there(made, groups, described(owners[0]))
            self.own_optimizer = made
        return made

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        owners = self.hooks.implemented("optimizer")
        if owners and optimizer is not self.own_optimizer:
            raise PlaitError(
                f"{described(owners[0])} makes the run's optimizer, and this step got another "
                f"{type(optimizer).__name__}: the run would not train as the strategy says; pass what "
                "applied.optimizer(make) returned"
            )

    def step(
        self,
        batch: Batch,
        optimizer: torch.optim.Optimizer,
        count: Count | None = None,
        observer: Observer | None = None,
        *,
        rows: int | None = None,
        max_norm: float = math.inf,
        skip: Callable[[Tensor], bool] | None = None,
    ) -> Stepped:
        """One training step: nothing else in Plait trains. Afterwards parameters are new and gradients are gone.

        batch: this data rank's rows of the global batch, all of them, on the CPU or the device.
        count: how the step's tokens are counted over all ranks; None: by one sum.
        rows: per micro-batch; None: one micro-batch. Gradients of micro-batches add up.
        max_norm: gradients are clipped to this norm.
        skip: whether the step whose gradients have this norm is skipped, the same on all ranks. Then it is over: beside
        `steps`, it has changed nothing, and the moments and hooks after clipping are left out.

        Collective over all ranks. Raises whatever a strategy's hook raises, and PlaitError for another optimizer than
        the one that a strategy made.
        """
        self._check_optimizer(optimizer)
        watch = every_moment(observer)
        watch.start(self.steps + 1)
        getattr(optimizer, "begin", bool)()  # some take gradients elsewhere than at the weights that are saved
        dealt = self.deal(batch)
        watch.count(dealt)
        tokens = (count or counted_with(self.units))(dealt)
        for part in self.parts:
            if not part.training:  # train() walks all modules: 3% of the host's time of a small model's step
                part.train()
        moved = dealt.to(self.device)
        total = self.forward_backward(moved.split(rows or len(moved.tokens)), tokens, observer=watch)
        watch.clip()
        norm = self.clip_grads(max_norm)
        skipped = skip is not None and skip(norm)
        self.steps += 1
        if skipped:
            self.balance.forget()
            for param in self.parameters():  # a strategy's optimizer has others
                param.grad = None
            getattr(optimizer, "undo", bool)()
        else:
            watch.optimizer()
            optimizer.step()
        optimizer.zero_grad()
        if not skipped:
            self.after_step(optimizer, self.steps, watch)
        return Stepped(total / tokens(), norm, tokens(), skipped)

    def deal(self, batch: Batch) -> Batch:
        """What this rank sees of a batch whose rows are its own: all of it, unless an axis splits the sequence.

        Call it before tokens are counted. `step` does.
        """
        given = {"tokens": batch.tokens, "labels": batch.labels, "positions": batch.positions}
        tokens, labels, positions = self.hooks.first("deal", **given, mesh=self.mesh)
        if positions is None and tokens.shape != batch.tokens.shape:
            raise PlaitError(
                f"{described(self.hooks.implemented('deal')[0])} returned a part of the tokens from its hook 'deal' "
                "without positions: tokens would count from 0 on every rank"
            )
        return attrs.evolve(batch, tokens=tokens, labels=labels, positions=positions)

    def units(self, batch: Batch) -> int:
        """How many of what the loss is divided by this rank counts for, in a dealt batch: tokens with a label, or the
        groups of rows of a loss of sequences. 0 on ranks that see what another one counts."""
        return getattr(self.loss, "units", Batch.valid)(batch) if self.mesh.is_dp_leader() else 0

    def forward_backward(
        self,
        micro_batches: Iterable[Batch],
        tokens: int | Callable[[], int],
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """Forward, loss and backward of each micro-batch: the gradients of this rank's part of a step.

        micro_batches: dealt, on this rank's device.
        tokens: the number of valid tokens of the step, over all ranks; or a function that returns it, called before
        each backward, so that counting may run beside the first forward; before all of it if there are stages.
        loss: (logits, labels) -> the loss summed over this rank's tokens; None: `self.loss`. Not called if
        `loss.chunks` is above 1.

        Returns the sum of the loss over this rank's tokens (float64 scalar); ranks that have other stages of the model
        get it too. Without gradients, as under `torch.no_grad()`, it runs forward only.
        """
        watch = every_moment(observer)
        chunked, divided = self.run.config.loss.chunks > 1, self.mesh.layout.count("layers") > 1
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        of_rows = loss is None and hasattr(self.loss, "units")  # a loss of sequences takes the whole micro-batch
        batches, computed = list[Batch](), list[int]()  # the micro-batches; the numbers of those with a loss
        if divided and torch.is_grad_enabled():
            self._divisor(tokens)  # ranks without logits call no loss

        def arguments() -> Iterator[tuple[Any, ...]]:
            for micro, batch in enumerate(micro_batches):
                watch.forward(micro)
                batches.append(batch)
                yield batch.arguments(labelled=chunked)

        with ExitStack() as context:

            def loss_of(i: int, result: Tensor) -> Tensor:
                if not computed:  # once: every backward runs before `context` ends
                    context.enter_context(loss_context(result))
                computed.append(i)
                watch.loss(i, None if chunked else result)
                given: Any = batches[i] if of_rows else batches[i].labels
                value = result if chunked else (loss or self.loss)(result, given)
                total.add_(value.detach())
                if not torch.is_grad_enabled():
                    return value
                count = self._divisor(tokens)  # it may wait, so before backward is announced
                watch.backward(i)
                return value / count

            inputs = arguments()
            self.hooks.first("forward_backward", parts=self.parts, inputs=inputs, loss=loss_of, mesh=self.mesh)
        if acting := self.hooks.implemented("forward_backward"):
            from plait.parallel.divided_layers import check_called

            check_called(acting, self.parts, computed, len(batches), sum(1 for _ in inputs))
        if divided:  # imported only by runs that need it
            from plait.parallel.divided_layers import over_stages

            over_stages(total, self.mesh)
        return total

    def backward(self, loss_sum: Tensor, tokens: float | Tensor) -> None:
        """Add the gradients of one micro-batch.

        loss_sum: summed over its tokens. tokens: the number of valid tokens of the step, over all ranks.
        """
        (loss_sum / self._divisor(tokens)).backward()

    def _divisor(self, tokens: Any) -> Any:
        """What the loss of the step is divided by, which from now on also scales what balances experts."""
        count = tokens() if callable(tokens) else tokens
        self.balance.scale(count * getattr(self.loss, "places", 1))  # balance is per token: a group has `places`
        return count

    def clip_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients in place to `max_norm` over all ranks; returns the norm before clipping (a scalar tensor)."""
        parameters = self._optimized or self.parameters()  # which walks all modules: 1% of a small model's step
        arguments = {"parameters": parameters, "max_norm": max_norm, "mesh": self.mesh, "norm_type": norm_type}
        return self.hooks.first("clip_grads", **arguments)

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        """The 2-norm of `tensors` over all ranks (a scalar tensor): some of this rank's gradients, such as a block's.

        Collective: all ranks ask for the same parts of the model in one order; a rank of other stages gives none.
        """
        return total_norm(tensors, self.mesh)

    def export(self, state: dict[str, Tensor]) -> Any:
        """What the exported folder holds, a `plait.Export`. state: FQN -> parameter or persistent buffer of this
        rank."""
        from plait.contract.exported import Export

        return self.hooks.first("export", state=state, spec=self.spec, run=self.run) or Export(state)

    def checkpoint(self, optimizer: torch.optim.Optimizer | None = None) -> tuple[dict[str, Any], Callable[[], None]]:
        """(state, after): the state under canonical FQNs, aliasing the live tensors, and a function to call after
        loading. With an optimizer it holds what strategies and observers keep, too."""
        state: dict[str, Any] = {}
        after: list[Callable[[], None]] = []
        for part in self.parts:
            arguments = {"model": part, "optimizer": optimizer, "mesh": self.mesh, "spec": self.spec}
            answer = self.hooks.first("checkpoint", **arguments)
            own, then = answer if isinstance(answer, tuple) else (answer, None)
            state |= own
            after += [then] if then else []
        if optimizer is not None:
            for kept, then in self.own_state(optimizer):
                state.update(kept)
                after.append(then)
        replica = Replica.of(self.mesh, self.run.strategies)
        if replica.axes or self.keepers():  # else nothing is compared when it is saved
            replica.mark(state)

        def done_all() -> None:
            for done in after:
                done()

        return state, done_all

    def keepers(self) -> list[str]:
        """Who keeps a state of its own: "strategy.NAME" or "observer.NAME", with which its entries' names begin."""
        seen = [f"observer.{name}" for name, each in self.observers.items() if hasattr(each, "state")]
        return [*(f"strategy.{name}" for name in self.hooks.owners("state")), *seen]

    def own_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Tensor], Callable[[], None]]]:
        """(entries that alias the live tensors, function to call after loading) of each of `keepers`."""
        named = {canonical(name): p for part in self.parts for name, p in part.named_parameters()}
        for keeper in self.keepers():
            kind, _, name = keeper.partition(".")
            if kind == "observer":
                yield own_entries(keeper, [functools.partial(self.observers[name].state, self)], named)
                continue
            arguments = {"optimizer": optimizer, "mesh": self.mesh, "run": self.run}
            ask = functools.partial(self.hooks.answer, "state", name, **arguments)
            yield own_entries(keeper, [functools.partial(ask, model=part) for part in self.parts], named)

    def after_step(self, optimizer: torch.optim.Optimizer, step: int, observer: Observer | None = None) -> None:
        """Balance the experts, and call the strategies' `after_step` for step `step` (from 1). `step` does."""
        watch = every_moment(observer)
        watch.balance()
        self.balance.after_step()
        watch.after()
        for part in self.parts:
            self.hooks.all("after_step", model=part, optimizer=optimizer, mesh=self.mesh, step=step, run=self.run)
