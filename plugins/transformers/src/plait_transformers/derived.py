"""The facts about a model that calls of its modules and trials of their halves tell."""

from typing import Any

import attrs
from torch import Tensor, nn

from plait_transformers.branch import NO_ENDS, Roles, divided, undivided
from plait_transformers.counts import Counts
from plait_transformers.experiments import can_be_cut
from plait_transformers.facts import ModelFacts
from plait_transformers.shrink import HEADS, VOCAB
from plait_transformers.spans import Span, divided_spans
from plait_transformers.supposed import Axis, Division, name_of
from plait_transformers.watch import Watch


def derived(model: nn.Module, watch: Watch, blocks: str, branches: list[str], logits: Tensor) -> ModelFacts:
    facts = ModelFacts("", False, "", f"{blocks}.*", (), (), (), {}, {}, {}, (), {}, {}, None, 1, (), (), None)
    found: dict[str, list[Roles]] = {}
    firsts: dict[str, tuple[str, Division]] = {}
    for fqn in branches:
        pattern = facts.pattern(fqn)
        its = divided(fqn, model.get_submodule(fqn), watch, firsts.get(pattern))
        found.setdefault(pattern, []).append(its)
        firsts.setdefault(pattern, (fqn, its.division))
    spans = _spans(model, facts, watch, [b for b in branches if not _has_no_end(found[facts.pattern(b)])])
    found = {
        pattern: each for pattern, each in found.items() if not any(end.startswith(f"{pattern}.") for end in spans)
    }
    roles: dict[str, tuple[Axis, ...]] = {}
    whole: dict[str, str] = {}
    accepted = [each.division for all_blocks in spans.values() for each in all_blocks]
    for pattern, answers in found.items():
        why = next((each.why for each in answers if each.why), "")
        ways = [each.division for each in answers]
        alike = {facts.pattern(n): a for way in ways for n, a in way.axes.items()}
        if not why and any(alike[facts.pattern(n)] != a for way in ways for n, a in way.axes.items()):
            why = "its layers differ"
        if not why and len({way.groups for way in ways if _has_keys(way)}) > 1:
            why = "its layers differ in the number of key heads"
        if not why and len({way.units for way in ways} - {0}) > 1:
            why = "its layers differ in the number of heads of a mixer"
        if not why and any(_differ(facts, one, other) for one in ways for other in ways):
            why = "its layers differ in what they count"
        if why:
            whole[pattern] = why
            for fqn in (b for b in branches if facts.pattern(b) == pattern):
                roles |= {facts.pattern(n): a for n, a in undivided(fqn, model.get_submodule(fqn), watch).items()}
        else:
            accepted += ways
    counted: Counts = {}
    for way in accepted:
        roles |= {facts.pattern(n): axes for n, axes in way.axes.items()}
        for name, of in way.counted.items():
            counted.setdefault(facts.pattern(name), {}).update(_by_pattern(facts, of))
    roles |= _others(model, facts, roles)
    ends = _ends(model, watch, blocks)
    begin, end = ends if can_be_cut(model, watch, blocks, logits) else ((), ())
    head = next(
        (
            fqn
            for fqn, call in watch.calls.items()
            if fqn in ends[1]
            and call.result is not None
            and call.result.data_ptr() == logits.data_ptr()
            and call.result.shape == logits.shape
            and isinstance(model.get_submodule(fqn), nn.Linear)
        ),
        None,
    )
    attention = {facts.pattern(fqn) for fqn in watch.attended}
    widths = {call.q[-1] for call in watch.attended.values()}
    simple = len(attention) == 1 and len(widths) == 1
    groups = min((way.groups for way in accepted), default=HEADS)
    units = max((way.units for way in accepted), default=0)
    readers = {end: each.reader and facts.pattern(each.reader) for end, (each, *_) in spans.items()}
    return attrs.evolve(
        facts,
        branches=(*found, *(p for end, reader in readers.items() if reader for p in (reader, end))),
        roles=roles,
        whole=whole,
        across={facts.pattern(n): axis for way in accepted for n, axis in way.across.items()},
        elementwise=tuple(dict.fromkeys(facts.pattern(n) for way in accepted for n in way.elementwise)),
        counted=counted,
        biases=tuple(dict.fromkeys(facts.pattern(n) for way in accepted for n in way.biases)),
        spans={end: (reader, spans[end][0].axis) for end, reader in readers.items()},
        widths=_widths(model, facts, roles, Division({}, groups=groups, units=units).sizes),
        queries={facts.pattern(n): q for way in accepted for n, q in _queries(model, way).items()},
        attention=attention.pop() if simple else None,
        head_width=max(widths, default=1),
        first=begin,
        last=end,
        head=head,
    )


def _widths(model: nn.Module, facts: ModelFacts, roles: dict, counts: dict[str, int]) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    for fqn, param in model.named_parameters():
        pattern = facts.pattern(fqn)
        for axis, size in zip(roles[pattern], param.shape, strict=True):
            if (name := name_of(axis)) in counts:
                found[pattern] = found.get(pattern, frozenset()) | {size // counts[str(name)]}
    return found


def _queries(model: nn.Module, way: Division) -> dict[str, int]:
    """FQN of a matrix whose rows are those of groups, each its queries, key and value -> the rows of a query."""
    of = {n: model.get_parameter(n) for n in way.axes}
    heads = {p.shape[axes.index("heads")] // HEADS for n, axes in way.axes.items() if "heads" in axes for p in (of[n],)}
    if len(heads) != 1 or way.groups == HEADS:
        return {}
    (q,) = heads
    rows = (HEADS + 2 * way.groups) * q
    return {n: q for n, axes in way.axes.items() if axes[:1] == ("kv_heads",) and of[n].shape[0] == rows}


def _by_pattern(facts: ModelFacts, of: dict[str, tuple[str, int, int]]) -> dict[str, tuple[str, int, int]]:
    return {attribute: (facts.pattern(matrix), fixed, own) for attribute, (matrix, fixed, own) in of.items()}


def _differ(facts: ModelFacts, one: Division, other: Division) -> bool:
    """Whether layers of two kinds, whose modules have the same names, count the same by attributes otherwise."""
    first, second = ({facts.pattern(n): _by_pattern(facts, of) for n, of in d.counted.items()} for d in (one, other))
    both = ((first[n], second[n]) for n in first.keys() & second.keys())
    return any(mine[a] != others[a] for mine, others in both for a in mine.keys() & others.keys())


def _has_keys(way: Division) -> bool:
    return way.groups != HEADS or any(name_of(axis) == "heads" for axes in way.axes.values() for axis in axes)


def _has_no_end(answers: list[Roles]) -> bool:
    """Whether what the branch returns is more than a matrix wrote."""
    return any(each.why == NO_ENDS for each in answers)


def _spans(model: nn.Module, facts: ModelFacts, watch: Watch, others: list[str]) -> dict[str, list[Span]]:
    """Pattern of a matrix that writes to the stream in no branch -> what is divided before it, in each block."""
    found: dict[str, list[Span]] = {}
    blocks = facts.blocks.removesuffix(".*")
    layers: Any = model.get_submodule(blocks)
    for number, block in enumerate(layers):
        for each in divided_spans(f"{blocks}.{number}", block, watch, others):
            found.setdefault(facts.pattern(each.writer), []).append(each)
    there = [facts.pattern(fqn) for fqn, _ in model.named_modules()]
    in_words = {end: {str(_pattern(facts, each)) for each in all_blocks} for end, all_blocks in found.items()}
    return {end: each for end, each in found.items() if len(each) == there.count(end) and len(in_words[end]) == 1}


def _pattern(facts: ModelFacts, each: Span) -> Any:
    way = each.division
    return each.reader and facts.pattern(each.reader), way.groups, {facts.pattern(n): a for n, a in way.axes.items()}


def _others(model: Any, facts: ModelFacts, roles: dict) -> dict[str, tuple[Axis, ...]]:
    """Parameters that are in no branch."""
    hidden = model.config.hidden_size
    tables = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    tables = [m for m in tables if not any(True for child in m.children() for _ in child.parameters())]
    vocab = {id(p) for module in tables for p in module.parameters(recurse=False)}
    found: dict[str, tuple[Axis, ...]] = {}
    for fqn, param in model.named_parameters():
        pattern = facts.pattern(fqn)
        if pattern in roles:
            continue
        axes: list[str | None] = [None] * param.dim()
        if id(param) in vocab and param.shape[0] == VOCAB:
            axes[0] = "vocab"
        if param.shape[-1] == hidden and (param.dim() > 1 or axes[0] is None):
            axes[-1] = "embed"
        found[pattern] = tuple(axes)
    return found


def _ends(model: nn.Module, watch: Watch, blocks: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules with parameters of their own before and after the blocks; none, if one is called otherwise."""
    inside = f"{blocks}."
    own = [
        fqn
        for fqn, module in model.named_modules()
        if not fqn.startswith(inside) and any(True for _ in module.parameters(recurse=False))
    ]
    own = [fqn for fqn in own if not any(fqn.startswith(f"{other}.") for other in own)]
    places = [watch.places.get(fqn, []) for fqn in own]
    if any(len(each) != 1 for each in places) or not watch.block_places:
        return (), ()
    start, end = min(watch.block_places), max(watch.block_places)
    first = tuple(f for f, each in zip(own, places, strict=True) if each[0] < start)
    last = tuple(f for f, each in zip(own, places, strict=True) if each[0] > end)
    return (first, last) if len(first) + len(last) == len(own) else ((), ())
