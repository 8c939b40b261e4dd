"""What holds for a family, found by experiments on a small copy of it in float64, in this process.

A derived spec must not be wrong in silence. So nothing is declared that was not seen: attention agrees with the
family's own, training computes what evaluation does, packed documents do not see each other, nothing outside the
branches mixes tokens, and the halves of a divided branch add up to the whole.

Shapes: B batch, T tokens, V vocabulary.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait import PlaitError
from plait_transformers.attention import NAME, OWN, refused
from plait_transformers.called import Called, noises, of_config
from plait_transformers.derived import derived
from plait_transformers.experiments import (
    BOUND,
    apart,
    are_summands,
    check_causal,
    check_training,
    mixes,
    needs_whole_rows,
    writes_in_evaluation,
)
from plait_transformers.facts import ModelFacts, in_blocks
from plait_transformers.init import recorded
from plait_transformers.language import names_in_whole, text_part, whole_on_meta
from plait_transformers.lent import read_outside
from plait_transformers.one_sentence import in_a_line, one_sentence
from plait_transformers.shrink import VOCAB, check_blocks, shrunken
from plait_transformers.watch import Watch, watching

TOKENS = 12


def facts_of(config: Any) -> ModelFacts:
    """The facts about transformers' `config`. Raises PlaitError for a family that cannot be trained, saying why."""
    family: Any = type(config)
    return _facts(family, said_of(config))


@functools.lru_cache(maxsize=8)
def _facts(cls: Any, said: str) -> ModelFacts:
    config = cls.from_dict(json.loads(said))
    kind = config.model_type
    failed = f"model=transformers cannot derive the spec of {kind}: a small copy of it fails with"
    check_blocks(config)
    with one_sentence(failed), torch.device("cpu"):
        small = small_config(cls, said)
        own = built_small(small, OWN, plain=True)
        _check_noise(small, own)
        as_in_training = writes_in_evaluation(own, _tokens())
        if as_in_training:
            own = built_small(small, OWN, plain=True, as_in_training=True)
        first: Exception | None = None
        found: list[ModelFacts] = []
        for how, masked in ((NAME, False), (OWN, True), (OWN, False)):
            try:
                found.append(_tried(kind, small, own, how, masked, as_in_training))
            except Exception as error:
                error.__cause__ = error.__cause__ or first
                first = error
            if found and (how == NAME or not found[-1].why_no_documents):
                return found[-1]  # else masks of the family's may keep documents apart, where those of Plait do not
        if found:
            return found[0]
        assert first is not None
        raise first


@functools.lru_cache(maxsize=8)
def small_config(cls: Any, said: str) -> Any:
    """The configuration of the small copy: the model of all sizes is built once for it, on meta."""
    config = cls.from_dict(json.loads(said))
    failed = f"model=transformers cannot build {config.model_type}: transformers ends with"
    with one_sentence(failed), torch.device("meta"):
        whole = of_config(config, OWN, plain=True)
    return shrunken(config, whole)


@torch.no_grad()
def _check_noise(config: Any, own: Any) -> None:
    """Raises PlaitError if a key for noise in training changes what `own`, built without noise, computes in evaluation.

    phimoe's router_jitter_noise is a threshold too: at 0, no gradient would reach the router.
    """
    if not (keys := noises(config)):
        return
    noisy: Any = built_small(config, OWN, plain=True, noise=0.5)
    for ours, theirs in zip(own.parameters(), noisy.parameters(), strict=True):
        theirs.copy_(ours)
    tokens = torch.randint(4, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    plain, with_noise = (super(Called, model).forward(tokens, use_cache=False).logits for model in (own, noisy))
    if apart(with_noise, plain) > BOUND:
        raise PlaitError(
            f"model=transformers cannot train {config.model_type}: Plait trains without noise, with {', '.join(keys)} "
            "at 0, and in this family that changes what is computed in evaluation too"
        )


def check_text_alone(config: Any) -> None:
    """Raises PlaitError unless the model of all inputs, `config`, computes of text what its language part does."""
    family: Any = type(config)
    _check_text_alone(family, said_of(config))


def said_of(config: Any) -> str:
    """What `config` says, as JSON: equal texts mean equal models."""
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


@functools.lru_cache(maxsize=8)
@torch.no_grad()
def _check_text_alone(cls: Any, said: str) -> None:
    config = cls.from_dict(json.loads(said))
    failed = f"model=transformers cannot train {config.model_type} on text: without other inputs it fails with"
    with one_sentence(failed), torch.device("cpu"):
        text = text_part(config)
        part_cls: Any = type(text)
        small = small_config(part_cls, said_of(text))
        part: Any = built_small(small, OWN, plain=True)
        generator = fill(part)
        whole = whole_on_meta(cls.from_dict({**config.to_dict(), "text_config": small.to_dict()}))
        for own, name in names_in_whole(whole, part).items():
            whole.set_submodule(name, part.get_submodule(own))
        tokens = torch.randint(4, VOCAB, (2, TOKENS), generator=generator)
        plain: Any = super(Called, part)
        wanted, found = (m(input_ids=tokens, use_cache=False).logits for m in (plain.forward, whole.eval()))
    if apart(found, wanted) > BOUND:
        raise PlaitError(
            f"model=transformers cannot train {config.model_type} on text: the logits of its language part, "
            f"{type(part).__name__}, are not those of the whole"
        )


@torch.no_grad()
def fill(model: nn.Module) -> torch.Generator:
    """Gives parameters values with which every branch counts; returns what drew them."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.normal_(0.0 if param.dim() > 1 else 1.0, 1.5 * param.shape[-1] ** -0.5, generator=generator)
    return generator


def built_small(
    config: Any,
    attention: str,
    plain: bool = False,
    mixers: tuple[str, ...] = (),
    masked: bool = False,
    noise: float = 0.0,
    as_in_training: bool = False,
) -> nn.Module:
    """A model of `config` with random weights, in float64. plain: with transformers' experts, masks and buffers."""
    with torch.device("cpu" if plain else "meta"), torch.random.fork_rng(devices=[]):
        model: Any = of_config(
            config, attention, plain, mixers, masked=masked, noise=noise, as_in_training=as_in_training
        )
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
def _tried(kind: str, config: Any, own: nn.Module, how: str, masked: bool, as_in_training: bool) -> ModelFacts:
    tokens = _tokens()
    model = built_small(config, how, masked=masked, as_in_training=as_in_training)
    own.load_state_dict(model.state_dict())
    wanted = check_causal(kind, own, tokens, bool(model.causal))
    with watching(model) as watch:
        logits = model(tokens)
    if apart(logits, wanted) > BOUND or any(call.masked for call in watch.attended.values()):
        raise refused(kind)
    watch.tokens = (tokens,)
    check_training(kind, model, tokens, logits)
    blocks = blocks_of(model)
    branches = [b for b in _branches(model, blocks, watch) if any(_in(called, b) for called in watch.calls)]
    if not are_summands(kind, model, tokens, [model.get_submodule(b) for b in branches]):
        branches = []
    layers: Any = model.get_submodule(blocks)
    parts = branches or [f"{blocks}.{number}" for number in range(len(layers))]
    watch.mixing = [b for b in parts if (how == OWN and not branches) or mixes(model, b, watch)]
    mixers = tuple(dict.fromkeys(in_blocks(blocks, b) for b in watch.mixing))
    outside = read_outside(model, blocks, tokens)
    lent = tuple(dict.fromkeys((in_blocks(blocks, reader), in_blocks(blocks, owner)) for reader, owner in outside))
    facts = derived(model, watch, blocks, branches, logits)
    why = _why_no_documents(config, model, how, mixers, tokens, as_in_training)
    rows = model.documents is None or needs_whole_rows(model, watch, blocks)
    facts = attrs.evolve(facts, whole_rows=rows, as_in_training=as_in_training)
    return attrs.evolve(facts, how=how, masked=masked, mixers=mixers, lent=lent, why_no_documents=why)


def _tokens() -> Tensor:
    return torch.randint(4, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def _in(fqn: str, module: str) -> bool:
    return fqn == module or fqn.startswith(f"{module}.")


def _why_no_documents(
    config: Any, model: nn.Module, how: str, mixers: tuple[str, ...], tokens: Tensor, as_in_training: bool
) -> str:
    """Why packed documents would see each other; empty, if their logits are those of the documents alone."""
    by_document = built_small(config, how, mixers=mixers, as_in_training=as_in_training) if how == NAME else model
    cut = TOKENS // 2 - 1
    positions = torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)]).expand_as(tokens)
    alone = torch.cat([model(tokens[:, :cut]), model(tokens[:, cut:])], dim=1)
    try:
        if apart(by_document(tokens, positions), alone) <= BOUND:
            return ""
    except Exception as error:
        return in_a_line(error)
    return "packed documents would see each other"


def blocks_of(model: Any) -> str:
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
        yield from _parts(f"{blocks}.{number}", block, watch)


def _parts(around: str, module: nn.Module, watch: Watch) -> Iterator[str]:
    """A part that returns several streams, such as the sum and the norm of it, holds branches: its own parts."""
    for name, child in module.named_children():
        fqn = f"{around}.{name}"
        call = watch.calls.get(fqn)
        half = call and call.entered is not None and call.result is not None and len({*call.widths()}) > 1
        if call and call.streams > 1:
            yield from _parts(fqn, child, watch)
        elif any(p.dim() > 1 for p in child.parameters()) and not half:
            yield fqn
