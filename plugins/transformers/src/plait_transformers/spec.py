"""The spec of a decoder of transformers, from facts about its family that were tried."""

from typing import Any

from plait import ModelSpec, PlaitError, UnequalParts
from plait.ops import Flops
from plait_transformers.attention import Inner
from plait_transformers.balance import Balanced, experts_of
from plait_transformers.facts import ModelFacts
from plait_transformers.fitted import fitted, sizes_of
from plait_transformers.init import patterns, recorded
from plait_transformers.supposed import Axis, name_of


def spec_of(model: Any) -> ModelSpec:
    """The spec of `model`, on any device. Raises PlaitError for a family that cannot be trained, saying why."""
    named = dict(model.named_parameters())
    facts = fitted(model.facts, named)
    axes = {facts.pattern(fqn): _axes(facts, fqn, param.dim()) for fqn, param in named.items()}
    sizes = sizes_of(facts, named, model.config.model_type)
    embedding = model.get_input_embeddings().weight
    tied = any(p is embedding for p in (getattr(model.get_output_embeddings(), "weight", None),))
    matrices = sum(_multiplied(p, axes[facts.pattern(fqn)], model.config) for fqn, p in named.items())
    matrices -= 0 if tied else embedding.numel()
    heads = getattr(model.config, "num_attention_heads", 0)
    whole_rows = model.images is not None and model.images.act_on_rows
    around = (facts.attention.rpartition(".")[0],) if whole_rows and facts.attention else ()
    layers = sum(isinstance(module, Inner) for module in model.modules()) or model.config.num_hidden_layers
    return ModelSpec(
        axes=axes,
        blocks=(facts.blocks,),
        sizes=sizes,
        branches=facts.branches,
        writers={reader: end for end, (reader, _) in facts.spans.items() if reader},
        attention=facts.attention,
        mixers=(*facts.mixers, *around),
        causal=model.causal,
        across=facts.across,
        elementwise=facts.elementwise,
        biases=facts.biases,
        documents=None if model.documents is None else "documents",
        init=patterns(recorded(model), facts.pattern),
        routers=tuple(fqn for fqn, module in model.named_modules() if isinstance(module, Balanced)),
        flops=Flops(parameters=matrices, attention=2 * layers * heads * facts.head_width),
        head=facts.head,
        before=facts.first if model.images is None else (),  # stages without the embedding cannot add images
        after=facts.last if model.images is None else (),
    )


def how_found(facts: ModelFacts) -> dict[str, str]:
    """Pattern -> how what the spec says of these modules was found."""
    found = {facts.blocks: "blocks: the list with as many modules as the model has layers"}
    of_spans = {pattern for end, (reader, _) in facts.spans.items() for pattern in (end, reader)}
    for branch in (each for each in facts.branches if each not in of_spans):
        its = [a for fqn, axes in facts.roles.items() if fqn.startswith(f"{branch}.") for a in axes]
        axes = (str(a) if isinstance(a, UnequalParts) else name_of(a) for a in its)
        divided = ", ".join(dict.fromkeys(a for a in axes if a not in (None, "embed", "experts")))
        why = facts.whole.get(branch)
        found[branch] = f"stays whole: {why}" if why else f"{divided} divided: its two halves add up to the whole"
    for end, (reader, axis) in facts.spans.items():
        what = f"{axis} divided: the two halves of what it writes to the stream add up to the whole"
        found[end] = f"with {reader}, which reads the stream: {what}" if reader else what
    mixes = "mixes tokens in a way of its own: those of its result change with another token"
    for mixer in facts.mixers:
        found[mixer] = f"{found[mixer]}; {mixes}" if mixer in found else mixes
    if facts.attention:
        found[facts.attention] = "attention: with it the logits are those of transformers' own"
    if facts.head:
        found[facts.head] = "head: what it returns are the logits"
    return found


def _multiplied(param: Any, axes: tuple[Axis, ...], config: Any) -> int:
    """How many of its elements a token is multiplied with: of experts, those of the ones that it visits."""
    numbers = experts_of(config) if "experts" in axes else None
    return int(param.numel()) if numbers is None else int(param.numel() * numbers[1] // param.shape[0])


def _axes(facts: ModelFacts, fqn: str, dims: int) -> tuple[Axis, ...]:
    axes = facts.roles.get(facts.pattern(fqn))
    if axes is None or len(axes) != dims:
        raise PlaitError(f"model=transformers cannot derive the axes of {fqn!r}: a small copy of the model has no such")
    return axes
