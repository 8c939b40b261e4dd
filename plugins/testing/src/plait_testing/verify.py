"""`plait verify`: checks that a model under strategies computes what one process does, and so that its spec is
right."""

import math
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait import PlaitError
from plait_testing.foreign import command

if TYPE_CHECKING:
    from argparse import Namespace

    from plait import Config, ModelSpec
    from plait.host import Assembly, Checked, Parser
    from plait_testing.finding import Finding

help = "check that a model under strategies, or any parallel PyTorch code, computes what one process does"
LARGEST = 100_000_000  # parameters; above that, minutes become hours
SHOWN = 10
HERE: dict[str, Any] = {"device": "cpu", "nnodes": 1, "nproc_per_node": "auto"}


def arguments(parser: "Parser") -> None:
    parser.description = """\
Checks that a model's spec is correct. For the overrides of `plait train` it takes three steps on random tokens, in
one process and then on N processes under the strategies, and compares initial parameters, the gradient of every
parameter, losses, norms, and how far the run's optimizer moved each parameter. All of it runs in float64 on this
machine's processor: use a small size of the model.
Shows what is wrong and the usual causes. Exit code: 0 if everything agrees, 1 if not.

With FILE.py::function, or module:function, it compares parallel code of any framework, which the function describes by
a plait.testing.Comparison (docs/verify-any-code.md). Exit code 2: it could not be compared."""
    parser.take_overrides()
    parser.take_world(least=2, default="launch.nproc_per_node, or the fewest with which each axis has more than one")
    command.arguments(parser)
    parser.epilog = """\
Needs cloudpickle: pip install 'plait-testing[testing]'.

Example: plait verify model=mine model.n_layers=2 train.seq_len=64 'strategy=[NAME]'
Example: plait verify mine.py::tensor_parallel --sarif found.sarif"""


def run(args: "Namespace") -> int:
    from plait.host import compose, overrides_of

    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        raise PlaitError(
            "plait verify needs cloudpickle, which is not installed: pip install 'plait-testing[testing]'"
        ) from None
    if (code := command.run(args)) is not None:
        return code
    return verify(compose(overrides_of(args)), args.world)


def verify(config: "Config", world: int | None = None) -> int:
    """Check the run of `config`, run it, print the findings. Returns the exit code."""
    from plait.host import is_joined

    checked = plan(config, world)
    config, layout, run = checked.config, checked.layout, checked.assembly.run
    name, count = config.model["_target_"], run.parameters
    print(f"model   {name}, {count:,} parameters, all in float64 on this machine's processor")
    for title, axes in [("layout", layout.dense), *layout.views.items()]:
        print(f"{title:<7} {layout.world_size} ranks: {layout.describe(axes)}")
    joined = any(map(is_joined, run.spec.routers_of(checked.assembly.model).values()))
    micro = 1 if joined else 2  # a loss of all routers is one of the whole batch
    samples = 2 * layout.count("batch")
    documents = _takes_positions(checked.assembly.model)
    parts = "two micro-batches" if micro > 1 else "one micro-batch"
    print(
        f"batch   {samples} samples of {config.train.seq_len} random tokens, a new batch for each step, in "
        f"{parts}{'; in the last step packed documents' if documents else ''}",
        flush=True,
    )
    findings, placements = _run(checked, run.spec, documents, micro, _say)
    print()
    for finding in findings:
        print(_line(finding))
    for text in _unknown(findings):
        print(text)
    unseen = any(finding.unseen for finding in findings)
    if all(finding.fine for finding in findings):
        print("what was compared agrees" if unseen else "all agree")
        return 1 if unseen else 0
    for text in _explained(findings, placements, run.spec, documents):
        print(text)
    return 1


def plan(config: "Config", world: int | None = None) -> "Checked":
    """Everything that can be checked before a rank starts. Raises PlaitError for what cannot be compared."""
    import attrs

    from plait import Precision
    from plait.host import check, check_ranks, plugins
    from plait_testing.strategies import is_own, others

    said = config.launch.nproc_per_node
    config = attrs.evolve(
        config,
        precision=Precision("float64", "float64", "float64"),
        launch=attrs.evolve(config.launch, **HERE),
        train=attrs.evolve(config.train, local_batch_size=2, global_batch_size=None),
    )
    for name in config.loss.function or ():
        if learns := getattr(plugins.load(name, "loss"), "learns", ""):
            raise PlaitError(
                f"plait verify trains on random tokens, and loss={name} learns from {learns}: verify the strategies "
                "without loss=, which is with cross-entropy"
            ).at("loss", name, fits="the default")
    if not config.strategy:
        known = ", ".join(others()) or "none"
        raise PlaitError(
            f"plait verify compares strategies with one process, but no strategy is selected; installed: {known}"
        ).at("strategy", fits=known)

    def ranks(assembly: "Assembly") -> int:
        _small_enough(assembly)
        return world or (said if isinstance(said, int) and said > 1 else _fewest(assembly))

    checked = check(config, ranks)
    check_ranks(checked.layout.world_size, "cpu")
    owners = {owner: axis for axis, owner in checked.layout.owner.items()}
    for name in checked.config.strategy:
        if is_own(name) and name in owners:
            raise PlaitError(
                f"{plugins.described(name)} differs from one process on purpose, and needs ranks for its axis "
                f"{owners[name]!r}, so there is nothing to compare it with: leave it out of strategy"
            )
    return checked


def in_one_process(strategies: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, float]:
    """(the strategies under which one process trains, those of exact training if that is something else, how far from
    it a gradient may be)."""
    from plait_testing.strategies import distance, extending, is_own

    own, exact = list(filter(is_own, strategies)), extending(strategies)
    one = {name: options for name, options in strategies.items() if name in own or name in exact}
    return one, exact if one != exact else None, sum(map(distance, own))


def _small_enough(assembly: "Assembly") -> None:
    run, options = assembly.run, assembly.run.config.model
    if run.parameters <= LARGEST:
        return
    whole = {key: value for key, value in options.items() if type(value) is int and value > 2}
    layers = [key for key, value in whole.items() if value == len(run.blocks)]
    dims = {n for shape in run.shapes.values() for n in shape}
    others = sorted((key for key in whole if whole[key] in dims and key not in layers), key=lambda key: -whole[key])
    ways = [f"model.{key}=2 (now {whole[key]})" for key in layers[:1]]
    ways += [f"a smaller model.{key} (now {whole[key]})" for key in others[:4]]
    raise PlaitError(
        f"the model has {run.parameters:,} parameters, and plait verify takes {LARGEST:,} at most, since it computes "
        f"in float64 on this machine's processor: take a smaller size of it{', by ' if ways else ''}{', '.join(ways)}"
    )


def _fewest(assembly: "Assembly") -> int:
    """The fewest ranks that the axes need; an axis of degree -1 gets at least two, and so does the world."""
    degrees = assembly.degrees_for(2)
    free = -1 in degrees
    least = max(math.prod(degree for degree in degrees if degree > 0) * (2 if free else 1), 2)
    for ranks in range(least, 8 * least + 1, least) if free else ():  # a view may need more than the dense axes
        try:
            assembly.layout_for(ranks)
        except PlaitError:
            continue
        return ranks
    return least


def _acts(name: str) -> bool:
    """Whether a strategy does more than configure others, which the check has already made it do."""
    from plait_testing.strategies import marked

    return bool(set(marked(name)) - {"configure", "choices"})


def _run(
    checked: "Checked", spec: "ModelSpec", documents: bool, micro: int, say: Any
) -> tuple[list["Finding"], dict[str, str]]:
    """Both trainings, on ranks that end afterwards. Raises PlaitError if a rank fails, and prints its traceback."""
    import attrs

    from plait import Compile, Remat
    from plait.host import Scratch
    from plait_testing.declared import TIMES, OfRun, compare, failed, grown, may_be_rounding, reference
    from plait_testing.finding import of_all_ranks
    from plait_testing.pool import Pool, RankError

    config, layout = checked.config, checked.layout
    vocab, data_ranks = _vocab(checked, spec), layout.count("batch")
    trial = OfRun(config=config, vocab=vocab, data_ranks=data_ranks, last=True, micro=micro, documents=documents)
    plain = attrs.evolve(trial, config=attrs.evolve(config, remat=Remat(), compile=Compile()), micro=1)
    pool, world = Pool(layout.world_size), layout.world_size
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM)}
    with Scratch() as folder:
        where = "in one process"
        try:
            one, exact, distance = in_one_process(config.strategy)
            seconds = pool.run(reference, plain, one, folder, exact, world=1, timeout=math.inf)[0]
            say(f"one process took {seconds:.1f} s")
            where = f"on {world} ranks"
            patience = 300 + 20 * world * seconds  # ranks share the processor, and compilation takes long
            acting = {name: options for name, options in checked.config.strategy.items() if _acts(name)}
            answers = pool.run(compare, trial, acting, folder, distance, world=world, timeout=patience)
            say(f"{world} ranks are done")
            bounds = {}
            if may_be_rounding(of_all_ranks(answers)):
                bounds = pool.run(grown, plain, one, folder, world=1, timeout=math.inf)[0]
            if bounds:
                say(
                    "rounding grows in this model: one process whose first weights differ in the last place is off by "
                    f"{max(bounds.values()) / TIMES:.1e}; the bounds of later steps are {TIMES} times its errors"
                )
                answers = pool.run(compare, trial, acting, folder, distance, bounds, world=world, timeout=patience)
        except RankError as error:
            note = failed(folder)
            if note is not None and note.ours:
                raise PlaitError(note.sentence) from None
            print(note.text if note else error, file=sys.stderr)
            sentence = f"rank {note.rank} raised {note.sentence}" if note else str(error).splitlines()[0]
            raise PlaitError(f"the model fails {where}: {sentence}") from None
        finally:
            pool.close()
            for number, handler in before.items():
                signal.signal(number, handler)
    return of_all_ranks(answers), answers[0][1]


def _takes_positions(model: Any) -> bool:
    """Whether the model's forward takes more than tokens, as `forward(tokens, positions=None)` does."""
    import inspect

    parameters = inspect.signature(model.forward).parameters.values()
    return len(parameters) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)


def _vocab(checked: "Checked", spec: "ModelSpec") -> int:
    """The number of tokens of the model."""
    config = checked.config
    sizes = [n for fqn, shape in checked.shapes.items() for n in _rows(spec, fqn, shape)]
    given = config.model.get("vocab_size")
    read = getattr(checked.source, "vocabulary", None)
    return min([*sizes, *([given] if isinstance(given, int) else [])], default=read or 2)


def _rows(spec: "ModelSpec", fqn: str, shape: tuple[int, ...]) -> list[int]:
    try:
        return [n for n, axis in zip(shape, spec.axes_of(fqn), strict=False) if axis == "vocab"]
    except PlaitError:  # a buffer
        return []


def _line(finding: "Finding") -> str:
    if finding.skipped:
        return f"-      {finding.what:<20} {finding.skipped}"
    what = f"{'ok' if finding.fine else 'WRONG':<6} {finding.what:<20}"
    if not finding.bound and finding.fine:
        return f"{what} all {finding.count} bitwise equal"
    bound = f"bound {finding.bound:.0e}" if finding.bound else "must be bitwise equal"
    many = f", {len(finding.wrong)} of {finding.count} are wrong" if finding.wrong else ""
    return f"{what} off by {finding.error:.1e} at most ({bound}), {finding.at}{many}"


def _unknown(findings: list["Finding"]) -> list[str]:
    """What the comparison says nothing of."""
    lines = []
    for finding in findings:
        names = finding.untrained
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(
                f"-      {'never trained':<20} the gradients of {len(names)} parameter(s) are zero in one process too, "
                f"so nothing is known of them: {', '.join(names[:SHOWN])}{more}"
            )
        lines += [
            f"WRONG  {name:<20} changes only such parameters, so this says nothing of it: give them initial values "
            "with which they train"
            for name in finding.unseen
        ]
    return lines


def _explained(
    findings: list["Finding"], placements: Mapping[str, str], spec: "ModelSpec", documents: bool
) -> list[str]:
    from plait.host import text
    from plait_testing.declared import meaning

    lines = []
    for finding in findings:
        wrong = sorted(finding.wrong, key=lambda name: -finding.wrong[name])
        rows = [(name, f"{finding.wrong[name]:.1e}", _axes(spec, name), placements.get(name, "-")) for name in wrong]
        if rows:
            lines += ["", f"{finding.what}: wrong, worst first"]
            rows = [("parameter", "off by", "logical axes", "lies as"), *rows[:SHOWN]]
            lines += text.table(rows, indent="  ")
            lines += [f"  and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
    return [*lines, "", *meaning(findings, documents)]


def _axes(spec: "ModelSpec", name: str) -> str:
    try:
        return f"({', '.join(map(str, spec.axes_of(name)))})"
    except PlaitError:  # a buffer
        return "-"


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: the ranks have just been ended
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(text, flush=True)
