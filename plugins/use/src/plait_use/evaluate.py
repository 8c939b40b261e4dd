"""`plait eval`: the loss of a trained model on held-out data."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait_use import tasks

if TYPE_CHECKING:
    from argparse import Namespace

    from plait import Config
    from plait.host import Checked, Parser
    from plait_use.trained import Trained

help = "evaluate a trained model on held-out data"


def arguments(parser: "Parser") -> None:
    parser.description = """\
Prints the loss, the perplexity and the number of tokens of the model of RUN on what its run validates on, or on other
data: data.path=held.jsonl takes all of these files, 'data.validation_path={a: a.jsonl, b: b.jsonl}' each by its name,
every sample once unless validation.batches=N says how many global batches.
RUN is a run or its name, a checkpoint, such as runs/NAME/checkpoints/best, an exported folder, or a folder of Hugging
Face's. The loss is that which training would print for the same samples, in every layout."""
    parser.add_argument("run", metavar="RUN", help="what is evaluated")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    tasks.add_arguments(parser)
    parser.take_overrides()


def run(args: "Namespace") -> int:
    from plait.host import make_data, on_ranks, overrides_of
    from plait_use.trained import find

    trained = find(args.run, overrides_of(args))
    if args.tasks is not None:
        return tasks.run(args, trained)
    config, whole = on_held_out(trained.config, args.overrides), takes_all(args.overrides)

    def given(checked: "Checked") -> Mapping[str, Any]:
        checkpoint = trained.loadable(checked)
        size = batch_of(trained, checked, whole)
        make_data(checked, once(lambda line: print(line, file=sys.stderr, flush=True)))
        return {"checkpoint": checkpoint, "global_batch_size": size, "whole": whole}

    sums = on_ranks(config, "plait_use.evaluate:evaluate", given)
    rows = {name: {"loss": loss / max(tokens, 1), "tokens": tokens} for name, (loss, tokens) in sums.items()}
    told = {"model": str(trained.path), "step": trained.step, **of_sets(rows)}
    print(json.dumps(told) if args.json else table(trained, rows))
    return 0


def once(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say` without what was said before: files that are evaluated are those of the data and of their validation."""
    said: set[str] = set()

    def new(line: str) -> None:
        if (text := line.removeprefix("validation: ")) not in said:
            said.add(text)
            say(text)

    return new


def takes_all(overrides: Sequence[str]) -> bool:
    """Whether each sample is taken once: of data that the overrides name, unless they say how many batches."""
    keys = _keys(overrides)
    return bool(keys & {"data.path", "data.validation_path"}) and "validation.batches" not in keys


def _keys(overrides: Sequence[str]) -> set[str]:
    return {each.lstrip("+").partition("=")[0] for each in overrides}


def on_held_out(config: "Config", overrides: Sequence[str]) -> "Config":
    """The config of an evaluation: of files that the overrides name, all is held out, and of a set to validate on
    nothing else is read. Raises PlaitError if nothing is held out."""
    keys = _keys(overrides)
    held = config.data.get("validation_path")
    if "data.path" in keys and not keys & {"data.validation_path", "data.validation_fraction"}:
        config = config.with_value("data.validation_path", config.data["path"])
    elif held and config.data.get("path") and "data.path" not in keys:
        config = config.with_value("data.path", held if isinstance(held, str) else next(iter(held.values())))
    size = config.train.global_batch_size  # known to the ranks; the check would compare it with their number
    config = config.with_value("train.global_batch_size", None) if size else config
    return config.with_value("validation.interval", max(config.validation.interval, 1))


def batch_of(trained: "Trained", checked: "Checked", whole: bool = False) -> int:
    """Samples of a global batch: those of the run, so that every layout takes the same samples. Raises PlaitError if
    they do not divide among this layout's data ranks. whole: each sample is taken once, by any batch."""
    from plait import PlaitError

    train, ranks = trained.config.train, checked.layout.count("batch")
    if whole:
        return train.local_batch_size * ranks
    size = train.global_batch_size or trained.batch or train.local_batch_size * ranks
    if size % ranks:
        raise PlaitError(
            f"the run's global batch of {size} samples does not divide among {ranks} data ranks: take another number "
            f"of ranks, or another batch, such as train.global_batch_size={size // ranks * ranks or ranks}"
        ).at("train.global_batch_size", size, fits=f"a multiple of {ranks}")
    return size


def evaluate(
    config: "Config", checkpoint: str | None, global_batch_size: int, whole: bool
) -> dict[str, tuple[float, int]]:
    """What `plait.host.validated` returns for the model. whole: of each sample once. Called by all ranks."""
    import torch

    from plait.host import build_source, load, load_model, open_batches, validated

    compared = checkpoint if needs_reference(config) else None  # with the weights at the start of the run
    applied = load_model(config, None if compared else checkpoint)
    data = applied.mesh.rank_and_size("batch")
    batches, _ = open_batches(build_source(config.data), config.train, global_batch_size, data)
    rows = math.gcd(config.train.local_batch_size, global_batch_size // data[1])
    count = None if whole else config.validation.batches
    if compared is not None:
        loss: Any = applied.loss
        table = torch.full((batches.texts,), -torch.inf, dtype=torch.float64)
        with loss.recorded(table):
            validated(applied, batches, count, rows)
        loss.reference = table
        load(compared, *applied.checkpoint())
    return validated(applied, batches, count, rows)


def needs_reference(config: "Config") -> bool:
    """Whether the loss compares with the weights at the start of the run."""
    from plait.host import plugins

    return any(getattr(plugins.load(name, "loss"), "reference", False) for name in config.loss.function or ())


def of_sets(rows: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The mean loss, as `val_loss` of a run, all tokens, and the rows of sets with names."""
    loss = sum(row["loss"] for row in rows.values()) / len(rows)
    named = {name: row for name, row in rows.items() if name}
    total: dict[str, Any] = {"loss": loss, "tokens": sum(row["tokens"] for row in rows.values())}
    return {**total, "sets": named} if named else total


def table(trained: "Trained", rows: Mapping[str, Mapping[str, float]]) -> str:
    from plait.host import text

    whole = of_sets(rows)
    named = whole.get("sets", {})
    lines = [["", "loss", "perplexity", "tokens"]]
    for name, row in {**named, "all": whole}.items():
        lines.append([name, f"{row['loss']:.4f}", f"{math.exp(min(row['loss'], 700)):.4g}", f"{row['tokens']:,}"])
    lines = lines if named else [line[1:] for line in lines]
    return "\n".join([f"model: {trained}", *text.table(lines)])
