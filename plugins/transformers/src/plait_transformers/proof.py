"""What holds for a family, found by experiments on a small copy of it in float64, in this process.

A derived spec must not be wrong in silence. So nothing is declared that was not seen: attention agrees with the
family's own, training computes what evaluation does, packed documents do not see each other, nothing outside the
branches mixes tokens, and the halves of a divided branch add up to the whole.

Shapes: B batch, T tokens, V vocabulary.
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait import PlaitError
from plait_transformers.attention import NAME, OWN, refused
from plait_transformers.branch import Roles, divided, undivided
from plait_transformers.called import of_config
from plait_transformers.counts import Counts
from plait_transformers.experiments import (
    BOUND,
    apart,
    are_summands,
    can_be_cut,
    check_causal,
    check_training,
    mixes,
    needs_whole_rows,
    not_called,
)
from plait_transformers.init import recorded
from plait_transformers.one_sentence import in_a_line, one_sentence
from plait_transformers.shrink import HEADS, VOCAB, shrunken
from plait_transformers.supposed import Axis, name_of
from plait_transformers.watch import Watch, watching

TOKENS = 12


@attrs.frozen
class ModelFacts:
    """About a family; FQNs are patterns, in which `*` is the number of a block.

    how:       the name of the attention function, in transformers' registry, with which it is built.
    masked:    the family's own function gets masks from Plait.
    whole_rows: blocks get what the family makes of the tokens that it sees of a row, such as its own masks.
    why_no_documents: why packed documents would see each other; empty, if they do not.
    blocks:    the blocks. branches: modules that read the stream and return a summand of it.
    mixers:    modules that mix tokens in a way of their own. lent: those that are not called themselves: modules around
               them read their parameters.
    roles:     parameter -> its logical axes. whole: branch -> why it is not divided.
    across, elementwise: as in a spec. counted: modules that count heads by attributes of their own.
    widths:    parameter -> its rows, or columns, for each head that they are divided by.
    attention: the inner attention, if all layers have the same. head_width: of queries.
    first, last: modules with parameters before and after the blocks. head: whose result is the logits, unchanged.
    """

    how: str
    masked: bool
    why_no_documents: str
    blocks: str
    branches: tuple[str, ...]
    mixers: tuple[str, ...]
    lent: tuple[str, ...]
    roles: dict[str, tuple[Axis, ...]]
    whole: dict[str, str]
    across: dict[str, str]
    elementwise: tuple[str, ...]
    counted: Counts
    widths: dict[str, int]
    attention: str | None
    head_width: int
    first: tuple[str, ...]
    last: tuple[str, ...]
    head: str | None
    whole_rows: bool = False

    def pattern(self, fqn: str) -> str:
        """The pattern of `fqn`: the number of its block as `*`."""
        return in_blocks(self.blocks.removesuffix(".*"), fqn)


def in_blocks(blocks: str, fqn: str) -> str:
    """`fqn`, in which the number of its block in the list `blocks` is `*`."""
    return re.sub(rf"^{re.escape(blocks)}\.\d+(?=\.|$)", f"{blocks}.*", fqn)


def facts_of(config: Any) -> ModelFacts:
    """The facts about transformers' `config`. Raises PlaitError for a family that cannot be trained, saying why."""
    family: Any = type(config)
    return _facts(family, json.dumps(config.to_dict(), sort_keys=True, default=str))


@functools.lru_cache(maxsize=8)
def _facts(cls: Any, said: str) -> ModelFacts:
    config = cls.from_dict(json.loads(said))
    kind = config.model_type
    failed = f"model=transformers cannot derive the spec of {kind}: a small copy of it fails with"
    with one_sentence(failed), torch.device("cpu"):
        small = shrunken(config)
        own = _built(small, OWN, plain=True)
        first: Exception | None = None
        found: list[ModelFacts] = []
        for how, masked in ((NAME, False), (OWN, True), (OWN, False)):
            try:
                found.append(_tried(kind, small, own, how, masked))
            except Exception as error:
                error.__cause__ = error.__cause__ or first
                first = error
            if found and (how == NAME or not found[-1].why_no_documents):
                return found[-1]  # else masks of the family's may keep documents apart, where those of Plait do not
        if found:
            return found[0]
        assert first is not None
        raise first


def _built(
    config: Any, attention: str, plain: bool = False, mixers: tuple[str, ...] = (), masked: bool = False
) -> nn.Module:
    """A model of `config` with random weights, in float64. plain: with transformers' experts, masks and buffers."""
    with torch.device("cpu" if plain else "meta"), torch.random.fork_rng(devices=[]):
        model: Any = of_config(config, attention, plain, mixers, masked=masked)
    if not plain:
        fills = recorded(model)
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in model.parameters():
                scale = param.shape[-1] ** -0.5 if param.dim() > 1 else 0.2
                param.normal_(0.0 if param.dim() > 1 else 1.0, 1.5 * scale, generator=generator)
            for fqn, buffer in model.named_buffers():
                fills[fqn](buffer, generator)
        model.tie_weights(recompute_mapping=False)
    for module in model.modules():
        for name, held in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if held.is_floating_point():
                module.register_parameter(name, nn.Parameter(held.detach().double()))
    model.tie_weights(recompute_mapping=False)
    return model.eval()


@torch.no_grad()
def _tried(kind: str, config: Any, own: nn.Module, how: str, masked: bool) -> ModelFacts:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCAB, (2, TOKENS), generator=generator)
    model = _built(config, how, masked=masked)
    own.load_state_dict(model.state_dict())
    wanted = check_causal(kind, own, tokens, bool(model.causal))
    with watching(model) as watch:
        logits = model(tokens)
    if apart(logits, wanted) > BOUND or any(call.masked for call in watch.attended.values()):
        raise refused(kind)
    watch.tokens = (tokens,)
    check_training(kind, model, tokens, logits)
    blocks = _blocks(model)
    branches = [b for b in _branches(model, blocks, watch) if any(_in(called, b) for called in watch.calls)]
    if not are_summands(kind, model, tokens, [model.get_submodule(b) for b in branches]):
        branches = []
    layers: Any = model.get_submodule(blocks)
    parts = branches or [f"{blocks}.{number}" for number in range(len(layers))]
    watch.mixing = [b for b in parts if (how == OWN and not branches) or mixes(model, b, watch)]
    mixers = tuple(dict.fromkeys(in_blocks(blocks, b) for b in watch.mixing))
    lent = tuple(dict.fromkeys(in_blocks(blocks, fqn) for fqn in not_called(model, watch, parts)))
    facts = _derived(model, watch, blocks, branches, logits)
    why = _why_no_documents(config, model, how, mixers, tokens)
    rows = model.documents is None or needs_whole_rows(model, watch, blocks)
    facts = attrs.evolve(facts, whole_rows=rows)
    return attrs.evolve(facts, how=how, masked=masked, mixers=mixers, lent=lent, why_no_documents=why)


def _in(fqn: str, module: str) -> bool:
    return fqn == module or fqn.startswith(f"{module}.")


def _why_no_documents(config: Any, model: nn.Module, how: str, mixers: tuple[str, ...], tokens: Tensor) -> str:
    """Why packed documents would see each other; empty, if their logits are those of the documents alone."""
    by_document = _built(config, how, mixers=mixers) if how == NAME else model
    cut = TOKENS // 2 - 1
    positions = torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)]).expand_as(tokens)
    alone = torch.cat([model(tokens[:, :cut]), model(tokens[:, cut:])], dim=1)
    try:
        if apart(by_document(tokens, positions), alone) <= BOUND:
            return ""
    except Exception as error:
        return in_a_line(error)
    return "packed documents would see each other"


def _blocks(model: Any) -> str:
    """The FQN of the list of blocks."""
    count = model.config.num_hidden_layers
    for fqn, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return fqn
    raise PlaitError(f"{model.config.model_type} has no list of {count} blocks")


def _branches(model: nn.Module, blocks: str, watch: Watch) -> Iterator[str]:
    """The parts of blocks that hold matrices, without those that, as their calls tell, do not get and return the
    stream, such as half of a feed-forward."""
    layers: Any = model.get_submodule(blocks)
    for number, block in enumerate(layers):
        for name, child in block.named_children():
            fqn = f"{blocks}.{number}.{name}"
            call = watch.calls.get(fqn)
            half = call and call.entered is not None and call.result is not None and len({*call.widths()}) > 1
            if any(p.dim() > 1 for p in child.parameters()) and not half:
                yield fqn


def _derived(model: nn.Module, watch: Watch, blocks: str, branches: list[str], logits: Tensor) -> ModelFacts:
    facts = ModelFacts("", False, "", f"{blocks}.*", (), (), (), {}, {}, {}, (), {}, {}, None, 1, (), (), None)
    found: dict[str, list[Roles]] = {}
    for fqn in branches:
        found.setdefault(facts.pattern(fqn), []).append(divided(fqn, model.get_submodule(fqn), watch))
    roles: dict[str, tuple[Axis, ...]] = {}
    whole: dict[str, str] = {}
    across: dict[str, str] = {}
    alone: list[str] = []
    counted: Counts = {}
    for pattern, answers in found.items():
        why = next((each.why for each in answers if each.why), "")
        ways = [each.division for each in answers]
        alike = {facts.pattern(n): a for way in ways for n, a in way.axes.items()}
        if not why and any(alike[facts.pattern(n)] != a for way in ways for n, a in way.axes.items()):
            why = "its layers differ"
        if why:
            whole[pattern] = why
            alike = {}
            for fqn in (b for b in branches if facts.pattern(b) == pattern):
                alike |= {facts.pattern(n): a for n, a in undivided(fqn, model.get_submodule(fqn), watch).items()}
        else:
            across |= {facts.pattern(n): axis for way in ways for n, axis in way.across.items()}
            alone += [facts.pattern(n) for way in ways for n in way.elementwise]
            for way in ways:
                for name, of in way.counted.items():
                    counted[facts.pattern(name)] = {a: (facts.pattern(m), fixed) for a, (m, fixed) in of.items()}
        roles |= alike
    roles |= _others(model, facts, roles)
    begin, end = _ends(model, watch, blocks) if can_be_cut(model, watch, blocks, logits) else ((), ())
    head = next(
        (
            fqn
            for fqn, call in watch.calls.items()
            if fqn in _ends(model, watch, blocks)[1]
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
    groups = min((each.division.groups for answers in found.values() for each in answers), default=HEADS)
    counts = {"heads": HEADS, "kv_heads": groups}
    return attrs.evolve(
        facts,
        branches=tuple(found),
        roles=roles,
        whole=whole,
        across=across,
        elementwise=tuple(dict.fromkeys(alone)),
        counted=counted,
        widths={
            facts.pattern(fqn): size // counts[str(name_of(axis))]
            for fqn, param in model.named_parameters()
            for axis, size in zip(roles[facts.pattern(fqn)], param.shape, strict=True)
            if name_of(axis) in counts
        },
        attention=attention.pop() if simple else None,
        head_width=max(widths, default=1),
        first=begin,
        last=end,
        head=head,
    )


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
