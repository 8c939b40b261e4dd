"""Does the spec say everything of the model, and nothing else? On the meta device."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from plait import ModelSpec, PlaitError, matches
from plait.host import assembled
from plait_testing.model_suite.subject import Subject, inside, shipped
from plait_testing.torch_internals import TorchDispatchMode

SHORT, LONG = 8, 16  # tokens of the rows whose operations are counted
SMALL = 2e-3  # of all products: what need not be said


class Described(Subject):
    def test_the_spec_names_every_parameter_and_buffer(self) -> None:
        model, spec = self.described()
        parameters = [fqn for fqn, _ in model.named_parameters()]
        buffers = [fqn for fqn, _ in model.named_buffers()]
        unnamed = [f"{fqn} in `axes`" for fqn in parameters if not _says(spec.axes_of, fqn)]
        unnamed += [f"{fqn} in `init`" for fqn in [*parameters, *buffers] if not _says(spec.init_of, fqn)]
        assert not unnamed, f"the spec does not name {', '.join(unnamed)}"
        assembled(model, spec)  # refuses a spec that does not fit

    def test_every_pattern_of_the_spec_is_used(self) -> None:
        """None that nothing matches, or only what an earlier one matches."""
        model, spec = self.described()
        parameters = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
        buffers = [fqn for fqn, _ in model.named_buffers()]
        unused = [f"{pattern!r} in `axes`" for pattern in _unused(spec.axes, parameters)]
        unused += [f"{pattern!r} in `init`" for pattern in _unused(spec.init, [*parameters, *buffers])]
        assert not unused, f"no parameter or buffer is the first to match {', '.join(unused)}"

    def test_units_divide_their_dims(self) -> None:
        model, spec = self.described()
        for fqn, param in model.named_parameters():
            for axis, parts, size in zip(spec.names_of(fqn), spec.parts_of(fqn), param.shape, strict=True):
                units = spec.sizes.get(str(axis), 1) * parts
                assert size % units == 0, f"{fqn!r} has {size} rows along {axis}, which are no {units} units"

    def test_blocks_are_alike_and_hold_the_branches(self) -> None:
        model, spec = self.described()
        blocks = spec.blocks_of(model)
        assert len(blocks) > 1, f"the small model has {len(blocks)} blocks, and needs two to be tested; see `options`"
        kinds = {type(block).__name__ for block in blocks.values()}
        assert len(kinds) == 1, f"blocks are of several classes: {', '.join(sorted(kinds))}"
        for field, modules in (("branches", spec.branches_of(model)), ("attention", spec.attention_of(model))):
            apart = [fqn for fqn in modules if not any(fqn.startswith(f"{block}.") for block in blocks)]
            assert not apart, f"`{field}` names {apart}, which no block holds"
            bare = [block for block in blocks if not any(fqn.startswith(f"{block}.") for fqn in modules)]
            assert not modules or not bare, f"`{field}` names nothing in {bare}"

    def test_before_and_after_hold_what_blocks_do_not(self) -> None:
        model, spec = self.described()
        if not (spec.before or spec.after):
            pytest.skip("its spec names neither `before` nor `after`: what is outside blocks is the whole model's")
        held = inside(model, spec, ("blocks", "before", "after"))
        left = [fqn for fqn, param in model.named_parameters() if param not in held]
        assert not left, f"neither blocks nor `before` nor `after` hold {left}"

    def test_tied_parameters_are_one(self) -> None:
        model, spec = self.described()
        for names in self.ties:
            one = {id(model.get_parameter(name)) for name in names}
            assert len(one) == 1, f"{' and '.join(names)} are {len(one)} parameters"
            said = {spec.axes_of(name) for name in names if _says(spec.axes_of, name)}
            assert len(said) == 1, (
                f"{' and '.join(names)} are one parameter with several axes: {sorted(map(str, said))}"
            )
            init = {id(spec.init_of(name)): spec.init_of(name) for name in names if _says(spec.init_of, name)}
            fills = list(init.values())
            assert all(fn == fills[0] for fn in fills), f"{' and '.join(names)} are filled by several functions"

    def test_operations_per_token(self) -> None:
        model, spec = self.described()
        if spec.flops is None:
            pytest.skip("its spec has no `flops`")
        for length in (SHORT, LONG):
            _check_flops(model, spec, length)

    def test_parameters_of_a_shipped_size(self, size: str) -> None:
        model, spec = shipped(size)
        count = sum(param.numel() for param in model.parameters())
        assert count == self.counts[size], f"model={size} has {count:,} parameters, not {self.counts[size]:,}"
        assembled(model, spec)  # refuses a spec that does not fit

    @pytest.mark.slow
    def test_operations_of_a_shipped_size(self, size: str) -> None:
        model, spec = shipped(size)
        if spec.flops is None:
            pytest.skip("its spec has no `flops`")
        _check_flops(model, spec, LONG)


class Products(TorchDispatchMode):
    """operations: of the products inside, by torch's formulas. Its `FlopCounterMode` also tracks modules: slow."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.operations += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _check_flops(model: nn.Module, spec: ModelSpec, length: int) -> None:
    """`spec.flops` is what torch counts of products; it may add 6 for each element of a norm or bias, or leave out what
    weighs the results of experts."""
    assert spec.flops is not None
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Products() as products:
        model(tokens)
    counted, said = 3 * products.operations / length, spec.flops(length)  # backward has two for each product
    vectors = sum(p.numel() for n, p in model.named_parameters() if sum(a != "experts" for a in spec.axes_of(n)) < 2)
    assert (1 - SMALL) * counted <= said <= counted + 6 * vectors, (
        f"at {length} tokens `flops` says {said:,} operations per token; the products are {counted:,.0f}, to which 6 "
        f"for each of the {vectors:,} elements of norms and biases may be added"
    )


def _says(ask: Callable[[str], Any], fqn: str) -> bool:
    try:
        ask(fqn)
    except PlaitError:
        return False
    return True


def _unused(patterns: Iterable[str], fqns: list[str]) -> list[str]:
    patterns = list(patterns)
    first = {next((p for p in patterns if matches(p, fqn)), None) for fqn in fqns}
    return [pattern for pattern in patterns if pattern not in first]
