"""`plait data`: what a run would train on, before it does."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise, repeat
from typing import TYPE_CHECKING, Any

from plait import IGNORE

if TYPE_CHECKING:
    from argparse import Namespace

    from plait import Batch, Batches
    from plait.host import Checked, Parser

Decoded = Callable[[Sequence[int]], str]
COUNTED = 100  # samples of which tokens are counted; a stream may be slow
SHOWN = 2  # samples

help = "show what a run would train on: epochs, what is cut, and the first samples with what is learned"


def arguments(parser: "Parser") -> None:
    from plait.host import whole

    parser.description = """\
Shows, for the overrides of `plait train`, the data of the run: how long an epoch is, what is left out or cut, which
share of the tokens is learned, and the first samples. If some tokens of a sample are not learned, those that are stand
in {+ +}; a hidden token stands behind what hides it. Tokens are made, and kept in the cache, as the run would make
them; nothing is trained."""
    parser.take_overrides()
    parser.take_world()
    parser.add_value("rows", "N", whole("rows", "a whole number"), f"how many samples are shown (default: {SHOWN})")


def run(args: "Namespace") -> int:
    from plait.host import compose, overrides_of

    config = compose(overrides_of(args))  # before torch is imported: a mistake is answered at once

    from plait.host import check, make_data

    checked = check(config, args.world)
    make_data(checked, print)
    for line in described(checked, SHOWN if args.rows is None else args.rows):
        print(line)
    return 0


def described(checked: "Checked", rows: int) -> Iterator[str]:
    """The lines about the data of a run, once they are made. rows: how many samples are shown."""
    from plait import Source  # not above: it imports numpy, and `plait --help` imports every command
    from plait.host import text

    train, ranks = checked.config.train, checked.layout.count("batch")
    size = train.global_batch_size or train.local_batch_size * ranks
    batches: Batches = checked.source.open(seq_len=train.seq_len, seed=train.seed, global_batch_size=size, dp=(0, 1))
    epoch, names = getattr(batches, "epoch", None), getattr(batches, "sources", ())  # a stranger's may lack them
    yield f"step      {size:,} samples of {train.seq_len:,} tokens, on {ranks} data rank{'s' * (ranks != 1)}"
    asked = f"train.steps={train.steps}" if train.epochs is None else f"train.epochs={train.epochs:g}"
    unknown = "of each source below" if names else "not known: the data are read as they come"
    length = f"{text.counted(epoch, 'sample')}, {text.counted(epoch / size, 'step')}" if epoch else unknown
    yield f"epoch     {length}; {asked}"
    most = max(COUNTED, rows)
    first = list(islice(_samples(batches), min(epoch or most, most)))
    yield f"learned   {_learned(first)}, in the first {len(first):,} sample{'s' * (len(first) != 1)}"
    passes = (
        batches.passes(round(train.epochs * epoch) if train.epochs and epoch else train.steps * size) if names else {}
    )
    for number, name in enumerate(names):
        own = [sample for sample in first if int(sample[3]) == number]
        count = f"; {passes[f'epoch/{name}']:.3g} epochs in the run" if f"epoch/{name}" in passes else ""
        yield f"{name:<9} {len(own):,} of these samples; {_learned(own)}{count}"
    decoded = getattr(checked.source, "decoded", partial(Source.decoded, checked.source))  # a stranger's may lack it
    marked = _behind if getattr(checked.source, "hides", False) else _next
    for number, sample in enumerate(first[:rows]):
        yield ""
        yield from _shown(f"{number} of {names[int(sample[3])]}" if names else f"{number}", sample[:3], decoded, marked)


def _learned(samples: Sequence[tuple[Any, ...]]) -> str:
    """How many of their tokens are learned."""
    learned = sum(int((sample[1] != IGNORE).sum()) for sample in samples)
    places = sum(len(sample[1]) for sample in samples)
    return f"{learned:,} of {places:,} tokens, {learned / max(places, 1):.1%}"


def _samples(batches: "Batches") -> Iterator[tuple[Any, Any, Any, Any]]:
    """(tokens, labels, positions or None, number of its source or None) of each sample in their order, the first three
    (T,)."""
    at = 0
    while True:
        batch: Batch = batches.take(at)
        at += len(batch.tokens)
        others = (repeat(None) if each is None else each for each in (batch.positions, batch.sources))
        yield from zip(batch.tokens, batch.labels, *others, strict=False)


Marked = list[tuple[int, bool]]  # tokens, and whether each is learned


def _next(tokens: Sequence[int], labels: Sequence[int]) -> list[Marked]:
    """Of each token, what is shown in its place: itself, learned by the one before; the last label is shown too."""
    learned = [False, *(label != IGNORE for label in labels)]
    shown = [[each] for each in zip(tokens, learned, strict=False)]
    shown[-1] += [(labels[-1], True)] if learned[-1] else []
    return shown


def _behind(tokens: Sequence[int], labels: Sequence[int]) -> list[Marked]:
    """The same of data that hide tokens: what is hidden stands behind what hides it."""
    pairs = zip(tokens, labels, strict=True)
    return [[(token, False), *([(label, True)] if label != IGNORE else [])] for token, label in pairs]


def _shown(number: str, sample: tuple[Any, Any, Any], decoded: Decoded, marked: Any) -> Iterator[str]:
    """A sample, document by document if tokens attend within one; what is learned is marked if some is not."""
    tokens, labels, positions = sample
    places: list[Marked] = marked(tokens.tolist(), labels.tolist())
    count, whole = int((labels != IGNORE).sum()), bool((labels != IGNORE).all())
    yield f"sample {number}: {count:,} of {len(tokens):,} tokens are learned"
    starts = [0] if positions is None else [i for i, place in enumerate(positions.tolist()) if place == 0]
    for begin, end in pairwise([*starts, len(tokens)]):
        each = [one for place in places[begin:end] for one in place]
        part, marks = [token for token, _ in each], [learned for _, learned in each]
        if len(starts) > 1:
            yield f"- tokens {begin:,} to {end - 1:,}"
        if len(part) > 1 and len({*part}) == 1 and not any(marks):
            yield f"  {decoded(part[:1])} {len(part):,} times"
        else:
            yield f"  {_marked(part, [False] * len(part) if whole else marks, decoded)}"


def _marked(ids: list[int], learned: list[bool], decoded: Decoded) -> str:
    """The tokens as one text, with `{+` before and `+}` after each stretch that is learned."""
    text, begin = "", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or learned[end] != learned[begin]:
            words = decoded(ids[begin:end])
            text += f"{{+{words}+}}" if learned[begin] else words
            begin = end
    return text.replace("\n", "\\n\n  ")
