"""Can the model be taken apart as its spec says: into stages of blocks, and branches into shares?"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait import ModelSpec, PlaitError, matches, stage
from plait_testing.model_suite.subject import (
    CLOSE,
    LENGTH,
    ROWS,
    Subject,
    alike,
    positions_of,
    takes_positions,
    tokens_for,
)
from plait_testing.widened import Widened

SHARED = ("heads", "kv_heads", "ffn")


class Cut(Subject):
    @torch.no_grad()
    def test_stages_make_the_whole(self) -> None:
        """Cut between any two blocks, for plain rows and for packed documents."""
        model, spec = self.real()
        try:
            stage(*self.described(), 0, 1)
        except PlaitError as refusal:
            pytest.skip(f"it cannot be cut: {refusal}")
        tokens, count = tokens_for(model), len(spec.blocks_of(model))
        kinds = [(tokens,), (tokens, positions_of(rows=ROWS))][: 1 + takes_positions(model)]
        for at in range(1, count):
            whole, _ = self.real()
            first, last = stage(whole, spec, 0, at), stage(whole, spec, at, count)
            for inputs in kinds:
                with Widened():
                    got, want = last(*inputs, stream=first(*inputs)), model(*inputs)
                assert alike(got, want), f"cut before block {at}, the two stages do not give the model's logits"

    @torch.no_grad()
    def test_modules_run_once_and_in_order(self) -> None:
        """`before`, each block, `after`; parameters of the ends are read in the forward of their own module alone:
        elsewhere they are not a number here."""
        model, spec = self.real()
        tokens, order, expected = tokens_for(model), list[str](), list[str]()
        want = model(tokens)
        values = {param: param.detach().clone() for param in model.parameters()}
        for field in ("before", "blocks", "after"):
            for fqn, module in getattr(spec, f"{field}_of")(model).items():
                expected.append(fqn)
                module.register_forward_pre_hook(lambda module, args, fqn=fqn: order.append(fqn))
                if field != "blocks":
                    _hide(module)
                    module.register_forward_pre_hook(lambda module, args: _show(module, values))
                    module.register_forward_hook(lambda module, args, out: _hide(module))
        got = model(tokens)
        rank = {fqn: i for i, fqn in enumerate(expected)}
        ends = {*spec.before_of(model), *spec.after_of(model)}
        blocks = [fqn for fqn in order if fqn not in ends]
        assert blocks == [*spec.blocks_of(model)], f"a forward calls the blocks {blocks}"
        kinds = ["before" if fqn in spec.before_of(model) else "after" if fqn in ends else "blocks" for fqn in order]
        first, last = kinds.index("blocks"), len(kinds) - kinds[::-1].index("blocks")
        assert sorted(order, key=rank.__getitem__) == expected, f"a forward calls {order}, not each of {expected} once"
        assert {*kinds[:first]} <= {"before"}, f"a forward calls {order[:first]} before the first block"
        assert {*kinds[last:]} <= {"after"}, f"a forward calls {order[last:]} after the last block"
        assert {*kinds[first:last]} == {"blocks"}, f"a forward calls {order[first:last]} among the blocks"
        assert torch.equal(got, want), "a parameter of `before` or `after` is read outside of its module's forward"

    @pytest.mark.parametrize("ranks", [2, 4])
    @torch.no_grad()
    def test_shares_of_a_branch_sum_to_the_whole(self, ranks: int) -> None:
        """What tensor parallelism rests on: a branch with some of its heads, or of its inner width, gives a summand."""
        model, spec = self.real()
        seen: dict[str, Any] = {}
        for fqn, branch in spec.branches_of(model).items():
            branch.register_forward_hook(
                lambda _, args, kwargs, out, fqn=fqn: seen.update({fqn: (args, kwargs, _summand(out))}),
                with_kwargs=True,
            )
        inputs = (tokens_for(model), positions_of((LENGTH // 2, LENGTH // 2), ROWS))[: 1 + takes_positions(model)]
        tried = 0
        with Widened():
            model(*inputs)
            for fqn, branch in spec.branches_of(model).items():
                if any(matches(pattern, fqn) for pair in spec.writers.items() for pattern in pair):
                    continue  # one alone has no share of the sum
                parts = [_share(branch, fqn, spec, rank, ranks) for rank in range(ranks)]
                if parts[0] is None:
                    continue
                args, kwargs, want = seen[fqn]
                shares = [_summand(functional_call(branch, part, args, kwargs)) for part in parts]
                assert alike(torch.stack(shares).sum(0), want, 10 * CLOSE), (
                    f"{ranks} shares of the branch {fqn!r} do not sum to it"
                )
                tried += 1
        if not tried:
            pytest.skip(f"no branch has heads or an inner width that {ranks} ranks could share")


def _summand(result: Any) -> Tensor:
    """Of what a branch returns: some return more beside it."""
    return result[0] if isinstance(result, tuple) else result


def _hide(module: nn.Module) -> None:
    for param in module.parameters():
        param.fill_(torch.nan)


def _show(module: nn.Module, values: dict[nn.Parameter, Tensor]) -> None:
    for param in module.parameters():
        param.copy_(values[param])


def _share(branch: nn.Module, prefix: str, spec: ModelSpec, rank: int, ranks: int) -> Any:
    """Name -> the part of a parameter of `branch` that one of `ranks` would hold; None if none is divided, or some
    cannot be."""
    shares, divided = dict[str, Tensor](), set[str]()
    for name, param in branch.named_parameters():
        fqn, part = f"{prefix}.{name}", param.data
        for dim, (axis, parts) in enumerate(zip(spec.names_of(fqn), spec.parts_of(fqn), strict=True)):
            if axis not in SHARED:
                continue
            if spec.sizes.get(axis, param.shape[dim] // parts) % ranks:
                return None
            divided.add(name)
            part = torch.cat([piece.chunk(ranks, dim)[rank] for piece in part.chunk(parts, dim)], dim)
        shares[name] = part
    for name in shares:  # beside a weight whose columns are divided, a bias counts once
        owner = name.rpartition(".")[0]
        beside = any(other in divided and other.rpartition(".")[0] == owner for other in shares if other != name)
        if rank and name not in divided and beside:
            shares[name] = torch.zeros_like(shares[name])
    return shares if divided else None
