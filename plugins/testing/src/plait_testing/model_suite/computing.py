"""Does the model compute what its spec promises? On the CPU, in float64, and in no more than seconds."""

import pytest
import torch
from torch import Tensor, nn

import plait
from plait import Loss, Precision, matches
from plait.host import simulated
from plait.ops import cross_entropy_sum
from plait_testing.model_suite.subject import (
    DOCUMENTS,
    LENGTH,
    ROWS,
    Subject,
    alike,
    gradients_of,
    loss_of,
    needs_positions,
    norm,
    positions_of,
    tokens_for,
    unequal_gradients,
    vocabulary,
)
from plait_testing.parity import FLOOR
from plait_testing.trial import ZERO
from plait_testing.widened import Widened

STEP = 1e-5  # of finite differences, whose error is about its square
DIFFERENCE = 1e-5  # of a derivative from the finite difference
SINGLE, HALF = 1e-5, 0.05  # of logits from those in float64: float32, bfloat16
FELT = 1e-9  # of logits: what a change must do


class Computing(Subject):
    def test_logits(self) -> None:
        """(B, T, V), finite, and of the same shape on the meta device."""
        model, _ = self.real()
        tokens = tokens_for(model)
        with torch.no_grad():
            logits, meta = model(tokens), self.build()(tokens.to("meta"))
        assert logits.shape == (ROWS, LENGTH, vocabulary(model)), f"logits are {tuple(logits.shape)}"
        assert meta.shape == logits.shape
        assert logits.isfinite().all(), "some logits are not finite"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @torch.no_grad()
    def test_dtypes_agree(self, dtype: str) -> None:
        """Logits have the dtype of the weights, near those in float64; not in bfloat16 if tokens choose experts."""
        model, spec = self.real()
        tokens = tokens_for(model)
        with Widened():
            want = model(tokens)
        got = model.to(getattr(torch, dtype))(tokens)
        assert got.dtype is getattr(torch, dtype), f"weights in {dtype} give logits in {got.dtype}"
        if spec.routers and dtype == "bfloat16":
            return
        error = float((got.double() - want).norm() / want.norm())
        bound = SINGLE if dtype == "float32" else HALF
        assert error <= bound, f"logits in {dtype} are off by {error:.1e} of those in float64 (bound {bound:.0e})"

    def test_a_gradient_reaches_every_parameter(self) -> None:
        model, _ = self.real()
        with Widened():
            grads = gradients_of(loss_of(model, tokens_for(model)), model)
        whole = norm(grads)
        dead = [name for name, grad in grads.items() if float(grad.norm()) <= ZERO * whole]
        surprising = [name for name in dead if not any(matches(pattern, name) for pattern in self.constant)]
        assert not surprising, f"the gradient is zero of {', '.join(surprising)}"
        moved = [p for p in self.constant if not any(matches(p, name) for name in dead)]
        assert not moved, f"`constant` names {', '.join(moved)}, whose gradient is not zero"

    def test_gradients_equal_finite_differences(self) -> None:
        """Of every parameter, along a direction of which half is its gradient and half is random.

        Parameters whose gradients are of about the same size move together. If that slope is wrong, each moves alone.
        """
        model, _ = self.real()
        tokens, generator = tokens_for(model), torch.Generator().manual_seed(2)
        with Widened():
            grads = gradients_of(loss_of(model, tokens), model)
        floor, ways = FLOOR * norm(grads), {}
        for name, grad in grads.items():
            way = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
            ways[name] = way / way.norm() + grad / grad.norm().clamp(min=1e-30)
        told = {name: float((grad * ways[name]).sum()) for name, grad in grads.items()}
        size = {name: max(abs(slope), floor) for name, slope in told.items()}

        def found(names: list[str]) -> float:
            return _slope(model, tokens, {name: ways[name] for name in names})

        for names in _of_like_size(size):
            bound = DIFFERENCE * min(size[name] for name in names)
            if abs(found(names) - sum(told[name] for name in names)) <= bound:
                continue
            for name in names:
                slope = found([name])
                assert abs(slope - told[name]) <= DIFFERENCE * size[name], (
                    f"the gradient of {name} says {told[name]:.6e} along a way on which the loss changes by {slope:.6e}"
                )

    @torch.no_grad()
    def test_no_token_sees_a_later_one(self) -> None:
        """Of an encoder each sees all others."""
        model, spec = self.real()
        before, at = tokens_for(model), LENGTH // 2
        after = before.clone()
        after[:, at] = (after[:, at] + 1) % vocabulary(model)
        with Widened():
            one, other = model(before), model(after)
        if spec.causal:
            assert alike(other[:, :at], one[:, :at]), f"token {at} changes the logits of those before it"
        else:
            assert not alike(other[:, :at], one[:, :at], FELT), f"token {at} changes no logits before it"
        assert not alike(other[:, at:], one[:, at:], FELT), f"token {at} changes no logits"

    @torch.no_grad()
    def test_packed_documents_are_separate(self) -> None:
        model, _ = self.real()
        needs_positions(model)
        packed = tokens_for(model, 1)
        with Widened():
            apart = torch.cat([model(document) for document in packed.split(DOCUMENTS, dim=1)], dim=1)
            assert alike(model(packed, positions_of()), apart), (
                "documents in one row do not give the logits of each alone"
            )
            assert not alike(model(packed)[:, DOCUMENTS[0] :], apart[:, DOCUMENTS[0] :], FELT), (
                "positions change nothing"
            )

    @torch.no_grad()
    def test_positions_count_from_zero_and_are_read(self) -> None:
        """Left out they are 0, 1, 2, ...; a gap of 4 in the middle of a document is felt behind it, and there alone."""
        model, spec = self.real()
        needs_positions(model)
        tokens, at = tokens_for(model, length=LENGTH - 4), LENGTH // 2
        places = torch.arange(tokens.shape[1])
        gap = places + 4 * (places >= at)
        with Widened():
            want = model(tokens)
            assert alike(model(tokens, places.expand_as(tokens)), want), "positions 0, 1, 2, ... are not the default"
            got = model(tokens, gap.expand_as(tokens))
        assert not spec.causal or alike(got[:, :at], want[:, :at]), (
            "a gap in the positions changes the logits before it"
        )
        assert not alike(got[:, at:], want[:, at:], FELT), "the model ignores how far apart its tokens are"

    def test_blocks_are_captured_whole(self) -> None:
        """One graph for all blocks of one structure, with the gradients that they have without."""
        model, spec = self.real()
        tokens = tokens_for(model)
        want = gradients_of(loss_of(model, tokens), model)
        blocks, graphs = spec.blocks_of(model), Graphs()
        torch.compiler.reset()
        for block in blocks.values():
            block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True)
        wrong = unequal_gradients(gradients_of(loss_of(model, tokens), model), want)
        kinds = self.graphs or len({_structure(block) for block in blocks.values()})
        assert graphs.count <= kinds, (
            f"{len(blocks)} blocks of {kinds} structures are {graphs.count} graphs: does a block know its number?"
        )
        assert not wrong, f"compiled, the gradients differ of {', '.join(wrong)}"
        torch.compiler.reset()

    @pytest.mark.slow
    def test_the_whole_model_is_one_graph(self) -> None:
        model, _ = self.real()
        tokens, graphs = tokens_for(model), Graphs()
        torch.compiler.reset()
        whole = torch.compile(model, backend=graphs, fullgraph=True)
        assert alike(whole(tokens), model(tokens)), "compiled, the logits differ"
        assert graphs.count == 1
        torch.compiler.reset()

    def test_the_loss_by_chunks_is_the_loss(self) -> None:
        model, spec = self.real()
        if spec.head is None:
            pytest.skip("its spec names no `head`, so that loss.chunks is refused")
        tokens = tokens_for(model)
        labels = tokens.roll(-1, 1)
        whole = cross_entropy_sum(model(tokens), labels)
        want = gradients_of(whole, model)
        with simulated(1):
            plait.apply(model, spec, precision=Precision("float64", "float64", "float64"), loss=Loss(3))
        model.eval()  # in training the core counts what routers send, and divides their loss as its own
        loss = model(tokens, labels=labels)
        assert alike(loss, whole), f"by chunks the loss is {float(loss)}, not {float(whole)}"
        wrong = unequal_gradients(gradients_of(loss, model), want)
        assert not wrong, f"by chunks the gradients differ of {', '.join(wrong)}"


class Graphs:
    """A compiler that runs what it captures as it is. count: of graphs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        self.count += 1
        return graph.forward


@torch.no_grad()
def _slope(model: nn.Module, tokens: Tensor, ways: dict[str, Tensor]) -> float:
    """How fast the loss changes if each parameter of `ways` goes along its own."""
    params, losses = {name: model.get_parameter(name) for name in ways}, []
    before = {name: param.detach().clone() for name, param in params.items()}
    for sign in (1, -1):
        for name, param in params.items():
            param.copy_(before[name] + sign * STEP * ways[name])
        with Widened():
            losses.append(float(loss_of(model, tokens)))
    for name, param in params.items():
        param.copy_(before[name])
    return (losses[0] - losses[1]) / (2 * STEP)


def _of_like_size(size: dict[str, float], most: int = 8, apart: float = 4.0) -> list[list[str]]:
    """Names in groups of up to `most`, in which no size is over `apart` times another: none hides behind another."""
    groups: list[list[str]] = []
    for name in sorted(size, key=lambda name: size[name]):
        if not groups or len(groups[-1]) == most or size[name] > apart * size[groups[-1][0]]:
            groups.append([])
        groups[-1].append(name)
    return groups


def _structure(block: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(param.shape)) for name, param in block.named_parameters())
