"""Builds a decoder of transformers that Plait can train."""

import math
import os
from typing import Any

from torch import nn

from plait import ModelSpec, PlaitError, WeightPart, mix_in
from plait_transformers.attention import NAME
from plait_transformers.balance import give_balance, usual_factor
from plait_transformers.called import give_whole_rows, of_config
from plait_transformers.counts import give_counts
from plait_transformers.facts import ModelFacts
from plait_transformers.fitted import fitted
from plait_transformers.language import REST, class_of_whole, text_part
from plait_transformers.one_sentence import one_sentence
from plait_transformers.parts import parts_in_whole, parts_of
from plait_transformers.proof import check_text_alone, facts_of
from plait_transformers.routers import routers_of
from plait_transformers.soft_tokens import give_images, images_in, tower_of
from plait_transformers.source import beside, has_weights, read_config
from plait_transformers.spec import how_found, spec_of


def decoder(
    path: str | None = None,
    weights: str = "files",
    config: dict[str, Any] | None = None,
    images: str | None = None,
    balance_loss: float | None = None,
) -> nn.Module:
    """The model of the local folder `path`, or of the keys in `config` alone; names of parameters are transformers'.

    weights: "files", those of the folder, or "init".
    images: a folder that `plait_transformers.images.write` made of `path`; None: no images.
    balance_loss: the factor of the family's loss of the balance of experts; None: what transformers trains with.
    Raises PlaitError for a folder or keys that are not those of a decoder, and for one that cannot be trained here.
    """
    if weights not in ("files", "init"):
        raise PlaitError(f"model.weights is {weights}; it must be files or init").at(
            "model.weights", weights, fits=("files", "init")
        )
    said = list[str]()
    read = read_config(path, config or {}, said.append)
    with one_sentence(f"model=transformers cannot build {read.model_type}: transformers ends with"):
        part = text_part(read)
        own = read if part is None else part
        if part is not None:
            check_text_alone(read)
        facts = facts_of(own)
        model: Any = of_config(
            own,
            facts.how,
            mixers=facts.mixers if facts.how == NAME else (),
            lent=facts.lent,
            masked=facts.masked,
            as_in_training=facts.as_in_training,
        )
        if facts.whole_rows:
            give_whole_rows(model, facts.blocks.removesuffix(".*"))
        give_counts(model, facts.counted)
        factor = usual_factor(own) if balance_loss is None else balance_loss
        if type(factor) not in (int, float) or not 0 <= factor < math.inf:
            raise PlaitError(f"model.balance_loss is {factor}; it must be a number of at least 0, or null").at(
                "model.balance_loss", factor, fits="a number of at least 0"
            )
        if factor:
            give_balance(model, routers_of(own), factor)
            said.append(f"model: a loss balances the experts, with the factor {factor}")
        mix_in(model, PlaitDecoder)
    if facts.how != NAME:
        said.append(own_attention(read.model_type, facts))
    model.why_no_documents = facts.why_no_documents
    model.facts, model.source, model.kept, model.said = facts, path, read.to_dict(), said
    if part is not None:
        model.whole, model.architecture = type(read), class_of_whole(read).__name__
        said.append(what_trains(read.model_type, path, images))
    if images is not None:
        _give_images(model, images)
    if path is not None and weights == "files":
        model.weights_from = os.path.abspath(path)
    if path is not None and (os.path.isfile(os.path.join(path, "tokenizer.json")) or has_weights(path)):
        model.tokenizer_from = os.path.abspath(path)  # if it has none, trained weights must not get bytes in silence
    return model


def _give_images(model: Any, folder: str) -> None:
    if (passed := model.passed_on()) is None:
        raise PlaitError(
            f"model.images={folder}, and model.path is no folder with the weights of a model that takes images"
        ).at("model.images", folder, fits=None)
    images, tower = images_in(os.path.abspath(folder), model.config.vocab_size)
    give_images(model, images)
    if tower != tower_of(*passed):
        raise PlaitError(
            f"model.images={folder} was made by another vision tower than that of model.path={model.source}: make it "
            "again"
        ).at("model.images", folder, fits="a folder made for model.path")
    model.images_from = model.images.folder


def what_trains(kind: str, path: str | None, images: str | None = None) -> str:
    """What a user is told of a model with more inputs than text."""
    kept = path is not None and has_weights(path)
    lacks = "lacks the rest, as model.path has no weights of it: from_pretrained draws them"
    rest = "has the rest as it is in model.path" if kept else lacks
    of = "text" if images is None else "text and images, whose features are frozen"
    return f"model: the language part of {kind} trains, on {of}; an export {rest}"


def own_attention(kind: str, facts: ModelFacts) -> str:
    """What a user loses where the family's own attention is used."""
    lost = "context_parallel and fused attention are not available"
    documents = f"; data.attention=document is refused: {facts.why_no_documents}" if facts.why_no_documents else ""
    return f"model: {kind} computes attention by itself, as Plait's differs from it: {lost}{documents}"


class PlaitDecoder:
    """Mixed into the class of transformers' model: what Plait asks of a model beside logits."""

    config: Any
    facts: ModelFacts  # of the configuration as it was read: that of the model has other values, for the same family
    source: str | None = None
    architecture: str  # the name of transformers' class, which strategies may change
    kept: dict[str, Any]  # the configuration as it was read, dropout included
    said: list[str]  # lines for the user of a run
    whole: Any = None  # the class of the configuration that was read, if this is the language part of a model

    def spec(self) -> ModelSpec:
        with one_sentence(f"model=transformers cannot derive the spec of {self.config.model_type}:"):
            return spec_of(self)

    def derived(self) -> dict[str, str]:
        """Pattern -> how what the spec says of it was found, for `plait inspect`."""
        model: Any = self
        return how_found(fitted(self.facts, dict(model.named_parameters())))

    def export_files(self) -> dict[str, str]:
        """What `from_pretrained` needs beside the weights: config.json, and the tokenizer of the folder."""
        model: Any = self
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        return beside(self.source, {**self.kept, "architectures": [self.architecture], "dtype": dtype})

    def weight_parts(self) -> dict[str, WeightPart]:
        """What each tensor of a folder of the family is: of mixtures, a tensor per expert."""
        read = (self.whole or type(self.config)).from_dict(self.kept)
        if (part := text_part(read)) is not None:
            return parts_in_whole(read, part)
        return parts_of(read, self.facts.how)

    def passed_on(self) -> tuple[str, list[str]] | None:
        """The folder, and the names of its tensors that an export has too, and no parameter here."""
        if self.whole is None or self.source is None or not has_weights(self.source):
            return None
        return self.source, [name for name, part in self.weight_parts().items() if part.fqn.startswith(REST)]
