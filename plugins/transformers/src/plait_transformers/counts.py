"""Modules that count heads by attributes of their own, such as `num_heads`: a rank that has a share of the heads must
count its own.

Which attributes these are is tried in `branch`. In a model that is trained, they follow what the matrices return.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from plait_transformers.documents import in_model
from plait_transformers.matrices import rows_of
from plait_transformers.shrink import HEADS

# module -> attribute -> the matrix whose rows are divided as what it counts is, how many of these every rank needs, and
# how many of what it counts
Counts = dict[str, dict[str, tuple[str, int, int]]]
OTHERS = re.compile("(?<!all_)head_(dim|size)|groups|rep|layer|idx|mask|max|rotary|index|window|chunk")


def counting(fqn: str, branch: nn.Module, inner: int, keys: int, readers: Mapping[str, int]) -> Iterator[Counts]:
    """What in the branch `fqn` may count heads: nothing, the numbers of heads, or also the products with their widths.

    inner: elements of all heads. keys: of all key heads, if there are fewer. readers: matrices whose rows are divided,
    and how many of these every rank needs.
    """
    yield {}
    numbers, products = Counts(), Counts()
    for name, module in branch.named_modules():
        full = f"{fqn}.{name}".strip(".")
        beside = {m: fixed for m, fixed in readers.items() if m.startswith(f"{full}.")}
        if not beside or not any(True for _ in module.children()):
            continue
        rows = {m: tuple(branch.get_parameter(f"{m}.weight".removeprefix(f"{fqn}.")).shape) for m in beside}
        for attribute, value in _numbers(module):
            few = "kv" in attribute or "key_value" in attribute or (value == keys != inner)
            if few and any(beside.values()):  # of the only key head, which every rank has
                continue
            of = next((m for m in beside if (keys if few else inner) in rows[m]), next(iter(beside)))
            if "head" in attribute and value in (HEADS, HEADS // 2):
                numbers.setdefault(full, {})[attribute] = (of, beside[of], 0)
            elif value in (inner, keys):
                products.setdefault(full, {})[attribute] = (of, beside[of], 0)
    if numbers:
        yield numbers
    if products:
        yield {name: {**numbers.get(name, {}), **products.get(name, {})} for name in {**numbers, **products}}


def _numbers(module: Any) -> Iterator[tuple[str, int]]:
    """The attributes of a module, and those of its configuration with `num` in their names, that may count heads."""
    said = {f"config.{n}": v for n, v in vars(getattr(module, "config", object)).items() if "num" in n and "head" in n}
    for name, value in {**vars(module), **said}.items():
        if type(value) is int and value > 1 and not OTHERS.search(name):
            yield name, value


NO_COUNTS = re.compile(r"head_\w*(dim|size)|hidden|kernel|width|state|rep|layer|idx|mask|max|window|chunk|rank|stride")


def numbers_of(module: Any) -> Iterator[tuple[str, int]]:
    """The attributes of a mixer, or of a module in one, that may count heads or channels."""
    for name, value in vars(module).items():
        if type(value) is int and value > 1 and not NO_COUNTS.search(name):
            yield name, value


def give_counts(model: nn.Module, counted: Counts) -> None:
    """Let the modules that the patterns of `counted` name count what their matrices return."""
    names = dict(model.named_modules())
    for pattern, attributes in counted.items():
        for fqn in in_model(model, [pattern]):
            block = fqn[: len(fqn) - len(pattern.rpartition("*")[2])]
            for attribute, (of, fixed, own) in attributes.items():
                matrix = names.get(block + of.rpartition("*")[2])
                if matrix is not None:  # a layer of another kind may have a module of the same name
                    follow(model.get_submodule(fqn), attribute, matrix, fixed, rows_of(matrix), own)


def follow(module: nn.Module, attribute: str, matrix: nn.Module, fixed: int, whole: int, own: int = 0) -> None:
    """Set `attribute` of `module` to its share, whenever `matrix`, which had `whole` rows, returns fewer elements.

    fixed, own: how many of these rows, and of what the attribute counts, every rank needs.
    """
    of, _, name = attribute.rpartition(".")
    if of and "follows" not in vars(module):  # its own configuration, not that of the model
        vars(module)["follows"] = True
        setattr(module, of, copy.copy(getattr(module, of)))
    owner = getattr(module, of) if of else module
    kept = getattr(owner, name)

    def count(matrix: nn.Module, args: Any, result: Tensor) -> None:
        setattr(owner, name, own + (kept - own) * (result.shape[-1] - fixed) // (whole - fixed))

    matrix.register_forward_hook(count)
