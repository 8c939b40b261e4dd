"""A mixture of sources of any kind, in exact shares."""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from plait import PlaitError, Source, misfit, near_miss
from plait_data.inner import naming, tells_apart, with_target
from plait_data.shares import Shares, whole_weights
from plait_data.text_source import Say

if TYPE_CHECKING:
    from plait import Batches
    from plait_data.mixed import Mixed

NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


@attrs.define(kw_only=True, slots=False)
class Mix(Source):
    """Samples of several sources.

    sources: name -> config of a source, with `kind`, the name of an installed source, or `_target_`.
    weights: name -> share of the samples, as numbers of any sum.
    tokens: name -> tokens in one epoch of the mixture, in place of weights.
    tokenizer: of all sources; "auto": as a single source takes it.
    template: of the sources that take one, such as `chat`; None: that of the tokenizer's folder.
    change_weights: whether a resumed run may have other weights than before.
    history: of earlier weights [sample number, weights or tokens of the samples before it], by a resumed run.
    """

    sources: dict[str, Any]
    weights: dict[str, float] | None = None
    tokens: dict[str, float] | None = None
    tokenizer: str = "auto"
    template: str | None = None
    change_weights: bool = False
    history: list[Any] = attrs.Factory(list)

    def __attrs_post_init__(self) -> None:
        if not self.sources:
            raise misfit("data.sources", self.sources, "a name and a data config for each source")
        for name, node in self.sources.items():
            if not NAME.fullmatch(name):
                raise PlaitError(
                    f"data.sources: {name!r} is no name of a source: it takes letters, digits, _ and -, and begins "
                    "with a letter"
                ).at("data.sources", name, fits="a name of letters, digits, _ and -")
            if not isinstance(node, Mapping):
                raise misfit(f"data.sources.{name}", node, "a data config, such as {kind: text, path: corpus/}")
        if (self.weights is None) == (self.tokens is None):
            which = "neither" if self.weights is None else "both"
            raise PlaitError(
                f"data=mix takes data.weights or data.tokens, and has {which}: a number for each of "
                f"{', '.join(self.names)}"
            ).at("data.weights", self.weights, fits="a number for each source")
        key, given = self._chosen
        if given.keys() != self.sources.keys():
            strange = [name for name in given if name not in self.sources]
            said = f"names {strange[0]!r}, which is not among" if strange else "does not name all of"
            close = near_miss(strange[0], list(self.names)) if strange else ""
            raise PlaitError(f"data.{key} {said} the sources {', '.join(self.names)}{close}").at(
                f"data.{key}", given, fits=self.names
            )
        for name, value in given.items():
            if not 0 <= value < math.inf:
                raise misfit(f"data.{key}.{name}", value, "a number of at least 0")
        if not any(given.values()):
            raise misfit(f"data.{key}", given, "at least one number above 0")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sources, sorted, so that the order of a config's keys changes nothing."""
        return tuple(sorted(self.sources))

    @property
    def _chosen(self) -> tuple[str, dict[str, float]]:
        return ("tokens", self.tokens) if self.tokens is not None else ("weights", self.weights or {})

    @cached_property
    def members(self) -> dict[str, Any]:
        """Name -> source."""
        made = {name: self._made(name) for name in self.names}
        tokenizers = {name: each.tokenizer for name, each in made.items() if hasattr(each, "tokenizer")}
        one, shared = next(iter(tokenizers.items()), ("", None))
        for name, tokenizer in tokenizers.items():
            if tokenizer != shared:
                raise PlaitError(
                    f"data.sources.{name}.tokenizer={tokenizer}, but {one} has {shared}: the sources of a mixture "
                    "share one, so set data.tokenizer alone"
                ).at(f"data.sources.{name}.tokenizer", tokenizer, fits=shared)
        for name, each in made.items():
            if hasattr(type(each), "gives"):
                raise PlaitError(
                    f"data.sources.{name} gives preferences, which no mixture takes: use data=pairs alone"
                ).at(f"data.sources.{name}", fits="another source")
            if (template := getattr(each, "template", self.template)) != self.template:
                raise PlaitError(
                    f"data.sources.{name}.template={template}: the sources of a mixture share one, which an export has "
                    "too, so set data.template alone"
                ).at(f"data.sources.{name}.template", template, fits=(self.template,))
        if len({getattr(each, "hides", False) for each in made.values()}) > 1:
            raise PlaitError(
                "in some of data.sources a label is the next token, in others a hidden one: a mixture takes masked "
                "data alone, or none"
            ).at("data.sources", self.names, fits="sources whose labels mean the same")
        return made

    def _made(self, name: str) -> Any:
        from plait.host import build_source

        key = f"data.sources.{name}"
        node = with_target(self.sources[name], key, ("mix",))
        with naming(key):
            made = build_source(node, key)
            shared = {}
            if getattr(made, "tokenizer", None) == "auto" != self.tokenizer:
                shared["tokenizer"] = self.tokenizer
            if getattr(made, "template", self) is None is not self.template:
                shared["template"] = self.template
            made = build_source({**node, **shared}, key) if shared else made
        return made

    @property
    def indexable(self) -> bool:  # type: ignore[override]
        return all(each.indexable for each in self.members.values())

    @property
    def attention(self) -> str:
        """What tokens of a sample see each other: if one source tells documents apart, all samples have positions."""
        return "document" if any(map(tells_apart, self.members.values())) else "across"

    @property
    def vocabulary(self) -> int | None:
        sizes = [getattr(each, "vocabulary", None) for each in self.members.values()]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def has_validation(self) -> bool:
        return any(self.members[name].has_validation for name in self._used())

    @property
    def hides(self) -> bool:  # type: ignore[override]
        return any(getattr(each, "hides", False) for each in self.members.values())

    def _used(self) -> list[str]:
        """The sources that give samples."""
        return [name for name in self.names if self._chosen[1][name]]

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        super().check(seq_len=seq_len, vocab_size=None)  # each source says it of its own
        self.shares(seq_len)
        self._each(lambda one: one.check(seq_len=seq_len, vocab_size=vocab_size))

    def prepare(self, say: Say) -> None:
        for name, one in self.members.items():
            with naming(f"data.sources.{name}"):
                one.prepare(lambda line, name=name: say(f"{name}: {line}"))

    def check_length(self, *, seq_len: int) -> None:
        self._each(lambda one: one.check_length(seq_len=seq_len))

    def shortened(self, *, seq_len: int) -> str:
        lines = {
            name: one.shortened(seq_len=seq_len) for name, one in self.members.items() if hasattr(one, "shortened")
        }
        return "; ".join(f"{name}: {line}" for name, line in lines.items() if line)

    def special_ids(self) -> tuple[list[int], int | None]:
        known = [one.special_ids() for one in self.members.values() if hasattr(one, "special_ids")]
        ends = dict.fromkeys(number for each, _ in known for number in each)
        return list(ends), next((begin for _, begin in known if begin is not None), None)

    def decoded(self, ids: Sequence[int]) -> str:
        one = next((one for one in self.members.values() if hasattr(one, "decoded")), None)
        return str(one.decoded(ids)) if one is not None else super().decoded(ids)

    def encoded(self, text: str) -> list[int]:
        one = next((one for one in self.members.values() if hasattr(one, "encoded")), None)
        return list(one.encoded(text)) if one is not None else super().encoded(text)

    def prompted(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        one = next((one for one in self.members.values() if hasattr(one, "prompted")), None)
        return list(one.prompted(messages)) if one is not None else super().prompted(messages)

    def fingerprint(self) -> str:
        """Of the sources: weights may change."""
        return hashlib.sha256(repr([(n, one.fingerprint()) for n, one in self.members.items()]).encode()).hexdigest()

    def resumed(self, before: Mapping[str, Any], samples: int) -> dict[str, Any]:
        key, now = self._chosen
        then = next(({name: before[name]} for name in ("weights", "tokens") if before.get(name)), None)
        if then is None:
            return {}  # of another kind of source
        if (earlier := {*before.get("sources", {})}) != {*self.sources}:
            names = ", ".join(sorted(earlier))
            raise PlaitError(
                f"data.sources has {', '.join(self.names)}, but the checkpoint was trained on {names}: a resumed run "
                "keeps its sources, and a weight of 0 leaves one out; checkpoint.init_from starts anew from weights"
            ).at("data.sources", list(self.names), fits=sorted(earlier))
        history = list(before.get("history") or [])
        if then == {key: now}:
            return {"history": history}
        was = next(iter(then.items()))
        if not self.change_weights:
            differ = next((n for n in self.names if was[0] != key or was[1].get(n) != now[n]), None)
            name = f"data.{key}" + (f".{differ}={now[differ]:g}" if differ is not None else "")
            saved = was[1].get(differ) if was[0] == key else f"data.{was[0]}={was[1]}"
            raise PlaitError(
                f"{name}, but the checkpoint was trained with {saved}: set data.change_weights=true to go on with "
                "other shares from the next sample on, or keep those"
            ).at("data.change_weights", False, fits=(True,))
        return {"history": [*history, [samples, then]]}

    def shares(self, seq_len: int) -> Shares:
        """Of all samples, those under earlier weights too."""
        parts, first = [], 0
        try:
            for until, earlier in self.history:
                ((key, given),) = earlier.items()
                parts.append((first, self._whole(key, given, seq_len)))
                first = until
        except (AttributeError, KeyError, TypeError, ValueError):
            raise misfit(
                "data.history", self.history, "empty, or what a resumed run wrote into its config.yaml"
            ) from None
        return Shares([*parts, (first, self._whole(*self._chosen, seq_len))])

    def _whole(self, key: str, given: Mapping[str, float], seq_len: int) -> list[int]:
        """Of weights, whole numbers in the same proportions; of tokens, whole samples."""
        if key == "weights":
            return whole_weights(given, self.names)
        return [math.ceil(given[name] / seq_len) for name in self.names]

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> "Mixed":
        from plait_data.mixed import Mixed

        epoch = sum(self._whole(*self._chosen, seq_len)) if self.tokens is not None else None

        def opened(name: str, size: int, at: tuple[int, int]) -> "Batches":
            with naming(f"data.sources.{name}"):
                return self.members[name].open(seq_len=seq_len, seed=seed, global_batch_size=size, dp=at)

        return Mixed(self.members, opened, self.shares(seq_len), epoch, seq_len, global_batch_size, dp, self._used())

    def _each(self, call: Callable[[Any], None]) -> None:
        for name, one in self.members.items():
            with naming(f"data.sources.{name}"):
                call(one)
