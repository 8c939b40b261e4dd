"""In a plan, what stands in for the strategy that cuts the model: it runs the stages of one rank, each by itself.

A stage gets streams and gradients that nobody sent, and follows a script of few micro-batches.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pluggy
import torch
from torch import Tensor, nn

from plait import ModelSpec, StagePlan, hookimpl, stage, stream_into
from plait.host import Assembly
from plait_plan.torch_internals import gradient_of_input, gradients_of_weights
from plait_plan.tracing.recorder import Recorder
from plait_plan.tracing.scripts import ActionSpan, Script, states

TRAITS = ("phase", "before", "after", "claims", "numerics")


class Alone:
    """`Alone(name, plan, place, like).take_over(assembly)`; `recorder` and `cuts` are set before the model is cut.

    name: of the strategy that cuts. place: of the rank along the axis that divides the layers. like: (shape, dtype) of
    the stream; None: the first stage is here and tells.
    cuts: (first block, end) of each stage. scripts: of each stage, what the next step runs. spans: of the last step.
    """

    recorder: Recorder
    cuts: list[tuple[int, int]]
    scripts: list[Script]

    def __init__(self, name: str, plan: StagePlan, place: int, like: Any) -> None:
        self.name, self.plan, self.place, self.like = name, plan, place, like
        self.spans: list[ActionSpan] = []
        self._held: list[Any] = []

    def take_over(self, assembly: Assembly) -> None:
        """Put a strategy with the same other hooks in place of the one that cuts. Call it before hooks are asked."""
        plain = assembly.run.strategies[self.name]
        own = {"parallelize": self.parallelize, "forward_backward": self.forward_backward}
        manager = pluggy.PluginManager("plait")
        marks = {name: manager.parse_hookimpl_opts(plain, name) for name in dir(plain)}
        hooks = {name: mark.get("specname") or name for name, mark in marks.items() if mark}
        methods = {name: getattr(plain, name) for name, hook in hooks.items() if hook not in own} | own
        traits = {name: getattr(plain, name) for name in TRAITS if hasattr(plain, name)}
        body = traits | {name: staticmethod(method) for name, method in methods.items()}
        assembly.run.strategies[self.name] = type("StandsIn", (), body)()

    @hookimpl
    def parallelize(self, model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
        self._spec = spec
        return [stage(model, spec, first, end) for first, end in self.cuts]

    @hookimpl
    def forward_backward(
        self, parts: list[nn.Module], inputs: Iterable[tuple[Any, ...]], loss: Callable[[int, Tensor], Tensor]
    ) -> bool:
        given, recorder = list(inputs), self.recorder
        if self.like is None:
            stream = stream_into(parts[0], self._spec, *given[0])
            self.like = stream.shape, stream.dtype
        stages = [_Stage(self, number, part, len(given)) for number, part in zip(self.numbers, parts, strict=True)]
        recorder.mark([x for one in stages for x in (*one.streams.values(), *one.gradients.values())], "collectives")
        self.spans, self._held = [], []
        recorder.boundary()
        for part, (one, script) in enumerate(zip(stages, self.scripts, strict=True)):
            for (kind, micro), state in zip(script, states(kind for kind, _ in script), strict=True):
                start = len(recorder.operators)
                recorder.micro, recorder.phase = micro, "forward" if kind == "forward" else "backward"
                getattr(one, kind)(micro, given[micro], loss)
                self.spans.append(ActionSpan(part, kind, state, start, len(recorder.operators)))
                recorder.boundary()
        return True

    @property
    def numbers(self) -> list[int]:
        """The stages of the rank."""
        return self.plan.stages_of(self.place)

    def hold(self, what: str, tensor: Tensor) -> None:
        if what in self.plan.keeps:
            self._held.append(tensor)


class _Stage:
    """One stage during one step, whose actions are those of `torch.distributed.pipelining`."""

    def __init__(self, owner: Alone, number: int, part: nn.Module, count: int) -> None:
        self.owner, self.number, self.part = owner, number, part
        self.shape, self.dtype = owner.like
        self.is_first, self.is_last = number == 0, number == len(owner.plan.blocks) - 1
        self.streams = {} if self.is_first else {i: self._made().requires_grad_() for i in range(count)}
        self.gradients = {} if self.is_last else {i: self._made() for i in range(count)}
        self._results: dict[int, Tensor] = {}
        self._groups: dict[int, Any] = {}
        self._passed: Tensor | None = None  # the gradient that is being sent

    def _made(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    def forward(self, micro: int, given: tuple[Any, ...], loss: Callable[[int, Tensor], Tensor]) -> None:
        result = self.part(*given) if self.is_first else self.part(*given, stream=self.streams[micro])
        if self.is_last:
            wide = torch.promote_types(self.dtype, torch.float32)
            self._results[micro] = loss(micro, result).to(wide)
        else:
            self.owner.recorder.keep()
            result = self._results[micro] = result.contiguous()
            if self.owner.plan.sends(self.number, self.number + 1):
                self.owner.hold("streams", result.detach())

    def backward(self, micro: int, *_: Any) -> None:
        torch.autograd.backward([self._results.pop(micro)], self._of(micro))
        if not self.is_first:
            stream = self.streams[micro]
            self._pass(stream.grad)
            stream.grad = None

    def stream(self, micro: int, *_: Any) -> None:
        if self.is_first:  # as torch does, which computes everything later
            return
        result = self._results.pop(micro)
        gradient, self._groups[micro] = gradient_of_input(
            result, self._of(micro), self.streams[micro], self.part.parameters()
        )
        self._pass(gradient)

    def weights(self, micro: int, *_: Any) -> None:
        if self.is_first:
            self.backward(micro)
        else:
            gradients_of_weights(self.part.parameters(), self._groups.pop(micro))

    def _of(self, micro: int) -> list[Tensor] | None:
        return None if self.is_last else [self.gradients[micro]]

    def _pass(self, gradient: Any) -> None:
        if self.owner.plan.sends(self.number, self.number - 1):
            self._passed = gradient
            self.owner.hold("gradients", gradient)
