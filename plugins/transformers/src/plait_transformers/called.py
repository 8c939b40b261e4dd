"""A decoder of transformers as it is built here, and as Plait calls it: all that a small copy of one needs too."""

import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait import PlaitError, mix_in
from plait.ops import DocumentMask
from plait_transformers.attention import NAME, give_inner, refused, register
from plait_transformers.both_ways import Documents
from plait_transformers.documents import give_documents
from plait_transformers.encoders import class_of, first_place, is_encoder
from plait_transformers.experts import give_sorted
from plait_transformers.kernels import give_references
from plait_transformers.lent import give_lent
from plait_transformers.matrices import give_widths
from plait_transformers.one_home import give_one_home

RANDOM = re.compile("drop|jitter|noise")  # in the names of keys for what is drawn in training


def of_config(
    config: Any,
    attention: str = NAME,
    plain: bool = False,
    mixers: Iterable[str] = (),
    lent: Iterable[tuple[str, str]] = (),
    masked: bool = False,
    noise: float = 0.0,
    as_in_training: bool = False,
) -> nn.Module:
    """The model of transformers' `config`, on the current device, in float32, without what is random in training.

    attention: the name of the function in transformers' registry; OWN: the family's own. plain: with transformers' own
    experts too. mixers: patterns of the modules that compute each packed document as a row of its own. lent: pairs
    of patterns, of a module and of another whose parameters it reads. masked: the family's own attention gets masks
    from here. noise: the value of all keys for what is drawn in training. as_in_training: evaluation computes what
    training does.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    register()
    kept = config.to_dict()
    unused = dict.fromkeys({"output_router_logits"} & {*kept}, False)  # Plait computes the loss of them by itself
    config = type(config).from_dict({**kept, **dict.fromkeys(noises(config), noise), **unused, "use_cache": False})
    cls, causal = class_of(config), not is_encoder(config)
    config._attn_implementation = attention
    give_references(cls)
    try:
        model = cls._from_config(config, attn_implementation=attention, experts_implementation="eager")
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise refused(config.model_type) from error  # it looks for the function in a dict of its own
    if attention == NAME:
        give_inner(model, causal)
    if not plain:
        give_sorted(model)
        give_widths(model)
    if (head := model.get_output_embeddings()) is not None:
        head.register_forward_pre_hook(in_rows)
    _refuse_late_rope(model, config.model_type)
    give_lent(model, lent)
    give_documents(model, mixers)
    mix_in(model, Called)
    model.file_names = give_one_home(model)
    mask = DocumentMask if causal else Documents
    model.documents = mask() if attention == NAME or masked else None
    model.causal, model.first_place = causal, first_place(model)
    model.always_masked, model.as_in_training = masked, as_in_training
    model.architecture = cls.__name__
    longest = getattr(config, "max_position_embeddings", None)
    model.max_seq_len = longest - model.first_place if isinstance(longest, int) else None
    model.vocab_size = config.vocab_size
    return model


def in_rows(head: Any, args: Any) -> Any:
    """What the head is called with, in as many rows as the batch: some families give the stream the shape of the ids,
    of which a rank of sequence parallelism has a part."""
    (x, *others), rows = args, getattr(head, "rows", 0)
    return (x.view(rows, -1, x.shape[-1]), *others) if rows and x.dim() == 3 and len(x) != rows else args


class WholeRows:
    """Mixed into a block of a family that makes masks or positions of the stream that it sees."""

    tokens = 0  # in a row of this forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args[0].shape[1] != self.tokens:
            raise PlaitError(
                f"this family makes masks or positions of the {args[0].shape[1]} tokens of a rank's part of the "
                f"stream, and a row has {self.tokens}: it cannot be used with a strategy that divides tokens between "
                "branches, such as tensor parallelism with sequence_parallel=true"
            )
        plain: Any = super()
        return plain.forward(*args, **kwargs)


def give_whole_rows(model: Any, blocks: str) -> None:
    """Let the blocks of the list `blocks` refuse a part of a row."""
    layers: Any = model.get_submodule(blocks)
    for block in layers:
        mix_in(block, WholeRows)
    object.__setattr__(model, "whole_rows", tuple(layers))


class Called:
    """Mixed into the class of transformers' model: called as Plait calls models."""

    documents: nn.Module | None  # None: the family makes its masks itself, of positions
    causal: bool
    first_place: int  # the position of a row's first token
    always_masked = False  # also rows that are one document
    as_in_training = False  # also in evaluation
    whole_rows: tuple[Any, ...] = ()  # blocks that get masks of the family's
    by_document: tuple[Any, ...] = ()  # modules that compute each packed document as a row of its own
    images: Any = None  # what has the features of tokens that images consist of
    why_no_documents: str = ""  # if packed documents would see each other

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, V). `positions` (B, T) restart at 0 where a packed document starts; None: a row is one.

        Raises PlaitError for packed documents, if the family cannot keep them apart.
        """
        plain: Any = super()
        if positions is not None and self.why_no_documents:
            key = "data.attention" if self.causal else "data.source.attention"
            raise PlaitError(
                f"model=transformers trains {cast(Any, self).config.model_type} without packed documents: "
                f"{self.why_no_documents}; {key}=across lets tokens see other documents of their row"
            ).at(key, "document", fits="across")
        for mixer in self.by_document:
            mixer.packed = positions is not None
        places = positions
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        mask = None  # with four dims: passed through to attention as it is
        opens = self.images is not None and self.images.both_ways
        if self.documents is not None and (self.always_masked or opens or positions is not None):
            dtype = cast(Any, self).get_input_embeddings().weight.dtype if self.always_masked else None
            mask = self.documents(places, dtype)
        for block in self.whole_rows:
            block.tokens = tokens.shape[1]
        if self.images is not None:
            mask = self.images.opened(mask, tokens, places) if opens else mask
            places = self.images.positions(tokens, places)
        places = places + self.first_place if self.first_place else places
        head: Any = cast(Any, self).get_output_embeddings()
        if head is not None:
            head.rows = len(tokens)
        given: dict[str, Any] = {"input_ids": tokens} if self.images is None else self._with_images(tokens)
        result = plain.forward(**given, attention_mask=mask, position_ids=places, use_cache=False).logits
        if head is not None:
            head.rows = 0
        return result

    def _with_images(self, tokens: Tensor) -> dict[str, Any]:
        x: Tensor = cast(Any, self).get_input_embeddings()(tokens)
        if x.shape[:2] != tokens.shape:
            raise PlaitError(
                "model.images cannot be used with a strategy that divides tokens between branches, such as tensor "
                "parallelism with sequence_parallel=true: set strategy.tensor_parallel.sequence_parallel=false"
            ).at("model.images", self.images.folder, fits=None)
        return {"inputs_embeds": x + self.images.features(tokens, x), **self.images.added(tokens, x)}

    def train(self, mode: bool = True) -> Any:
        plain: Any = super()
        return plain.train(mode or self.as_in_training)

    def warn_if_padding_and_no_attention_mask(self, *args: Any, **kwargs: Any) -> None:
        """transformers looks at the values of tokens here, which costs time on a GPU."""


def noises(config: Any) -> list[str]:
    """The keys of `config` for what is drawn in training, such as a probability of dropout, that are not 0."""
    return [name for name, v in config.to_dict().items() if RANDOM.search(name) and isinstance(v, float) and v]


def _refuse_late_rope(model: nn.Module, kind: str) -> None:
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for each in types.values() if isinstance(types, dict) else [types]:
            if each is not None and ("dynamic" in each or each == "longrope"):
                raise PlaitError(
                    f"this {kind} has rope_type={each}, which changes RoPE with the length of the input; Plait trains "
                    "models whose positions turn in the same way at every length"
                )
