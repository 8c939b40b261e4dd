"""Everything that can be checked before a rank starts: typed config, strategies, model, mesh, batch, data."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from plait.check.before_torch import check_copies, check_rate
from plait.check.checked import Checked
from plait.check.elastic import machine_counts
from plait.check.epochs import check_epochs
from plait.check.facts import CORE, code_of
from plait.check.ramp import check_ramp
from plait.check.resumed_data import batch_to_keep
from plait.checkpoint.passed_on import passed_on
from plait.compose.targets import build_source, target_of
from plait.contract.config import Config, accumulation
from plait.contract.errors import PlaitError, in_yaml, misfit, near_miss
from plait.contract.kinds import KINDS
from plait.contract.model_spec import ModelSpec
from plait.contract.run import Run
from plait.contract.weight_part import parts_by_fqn, weight_parts
from plait.data.parts import unshared
from plait.data.source import blaming_source
from plait.parallel.assembly import Assembly, assemble
from plait.parallel.optimizer_groups import groups_of
from plait.parallel.process_group import device_of
from plait.parallel.state import shapes, tied_names
from plait.records.flight_recorder import check_size
from plait.records.sinks import check as check_metrics
from plait.records.sinks import selected
from plait.records.text import any_of
from plait.strategies.registry import create_all, distributions
from plait.train.optimizer_options import check_optimizer
from plait.train.schedule import learning_rate

MOST = 16  # ranks of another machine
World = int | Callable[[Assembly], int] | None


def check(
    config: Config, world: World = None, folder: Path | None = None, files: Mapping[str, str] | None = None
) -> Checked:
    """Check the run of `config` for `world` ranks; None: as many as `launch.*` and the degrees ask for. It may be
    a function that tells them for the configured assembly.

    One of several machines knows only its own number of ranks: there, what fits some number of the others passes, and
    rank 0 checks the whole when all have met. folder: the run's, if it has one; it may not exist yet. files: name ->
    text that strategies left in an earlier check of this start.
    Raises PlaitError for the first thing that does not fit.
    """
    launch = config.launch
    if launch.elastic:
        machines = int(os.environ.get("GROUP_WORLD_SIZE", launch.most))
        return _check(config, world, folder, machines, files) if world is not None else _check_elastic(config, folder)
    if world is not None or launch.most == 1 or type(launch.nproc_per_node) is not int:
        return _check(config, world, folder)
    here, others = launch.nproc_per_node, launch.most - 1
    try:
        return _check(config, None, folder)
    except PlaitError:
        for world in range(here + others, here + MOST * others + 1) if here > 0 else ():
            with contextlib.suppress(PlaitError):
                return attrs.evolve(_check(config, world, folder), ranks_per_node=here)
        raise


def _check_elastic(config: Config, folder: Path | None) -> Checked:
    """The check for the most machines. If they do not fit, the error names numbers of machines that do."""
    launch = config.launch
    try:
        most = _check(config, None, folder)
        return _with_plans(most, config, folder) if _planned(most.assembly.run, config) else most
    except PlaitError as error:
        fits = []
        for count in launch.machines[:-1][-MOST:]:
            with contextlib.suppress(PlaitError):
                _check(config.with_value("launch.nnodes", count), None, folder)
                fits.append(count)
        if not fits:
            raise
        raise PlaitError(
            f"launch.nnodes={launch.nnodes}: {launch.most} machines do not fit, but {any_of(fits)} would: {error}"
        ).at("launch.nnodes", launch.nnodes, fits=fits) from error


def _planned(run: Run, asked: Config) -> bool:
    """Whether strategies select others, or the batch, for the number of ranks that there is."""
    decided = {key for each in run.strategies.values() for key in getattr(each, "decides", ())}
    return "train.local_batch_size" in decided or run.strategies.keys() != asked.strategy.keys()


def _with_plans(most: Checked, config: Config, folder: Path | None) -> Checked:
    """`most`, checked for the most machines, with what strategies decide for each smaller number of machines; all for
    one global batch."""
    if most.assembly.run.resumed_batch is None:
        config = config.with_value("train.global_batch_size", most.config.train.global_batch_size)
    fit, files, said = [config.launch.most], {**most.files}, [*most.said]
    for count in reversed(config.launch.machines[:-1]):
        try:
            checked = _check(config, count * most.ranks_per_node, folder, count, files)
        except PlaitError as error:
            said.append((f"launch: {count} machine{'s' * (count > 1)} would not train: {error}", ""))
        else:
            fit.append(count)
            files |= checked.files
            said += checked.said
    return attrs.evolve(most, machines=tuple(reversed(fit)), files=files, said=said)


def _check(
    config: Config,
    world: World,
    folder: Path | None,
    machines: int | None = None,
    files: Mapping[str, str] | None = None,
) -> Checked:
    """machines: that start `world` ranks, if the run is elastic."""
    device_type = device_of(config.launch.device)
    first = world if isinstance(world, int) else _guess(config, device_type)
    assembly = assemble(config, first, device_type=device_type, folder=folder)
    model, run, asked = assembly.model, assembly.run, config
    run.files |= {name: text for name, text in (files or {}).items() if not folder or not (folder / name).exists()}
    run.resumed_batch = batch_to_keep(config.checkpoint, folder) if folder and folder.exists() else None
    if config.checkpoint.init_from is None and (own := getattr(model, "weights_from", None)):
        run.set("checkpoint.init_from", own)
    for key in ("tokenizer", "images"):
        if config.data.get(key) == "auto" and (own := getattr(model, f"{key}_from", None)):
            run.set(f"data.{key}", own)
    for line in getattr(model, "said", ()):
        run.say(line)
    assembly.configure()
    run.set("strategy", {name: _options(made) for name, made in run.strategies.items()})
    config = run.config
    if callable(world):
        run.world_size = world(assembly)
    elif world is None and config.launch.nproc_per_node == "auto":
        run.world_size = assembly.fit_world(run.world_size)
    counts, most = tuple(config.launch.machines), None
    if config.launch.elastic:
        counts, most = machine_counts(assembly.extend(), machines, _planned(run, asked))
    layout, ranks = assembly.extend().layout, assembly.layout.world_size
    config = _with_typed_options(run)
    _check_model(config, model, run.spec)
    accumulation(config, layout.count("batch"))
    if run.spec.routers:
        from plait.check.joined_balance import check_joined

        check_joined([*run.spec.routers_of(model).values()], layout, config)
    source = build_source(config.data)
    if config.train.ramp:
        check_ramp(config, layout.count("batch"), source.indexable)
    if not source.indexable and run.resumed_batch is None:
        _check_parts(run, most, layout.count("batch"))
    with blaming_source(source, "check"):
        source.check(seq_len=config.train.seq_len, vocab_size=_model_option(config, model, "vocab_size"))
    if config.loss.function or hasattr(source, "gives"):
        from plait.parallel.sequence_loss import check_learns

        check_learns(config, source)
    _check_validation(config, source.has_validation)
    check_epochs(config, source.indexable)
    check_metrics(config.metrics)
    check_size()
    check_copies(config.checkpoint)
    _check_backend(config)
    _check_profile(config, ranks, device_type)
    by_package = distributions()
    of_plugins = sorted({by_package[name] for name in code_of(config) if name in by_package} - {CORE})
    per_node, rest = divmod(ranks, config.launch.most)
    if rest and world is None:
        raise PlaitError(f"{ranks} ranks do not divide evenly over launch.nnodes={config.launch.nnodes} machines").at(
            "launch.nnodes", config.launch.nnodes, fits=f"a divisor of {ranks}"
        )
    held, parts = shapes(model), weight_parts(model)
    parts_by_fqn(held, parts)
    passed_on(model)
    return Checked(
        assembly,
        layout,
        source,
        per_node,
        of_plugins,
        held,
        tied_names(model),
        parts,
        run.files,
        run.said,
        counts,
    )


def _check_parts(run: Run, most: int | None, data_ranks: int) -> None:
    """Raises PlaitError if a batch does not divide among the parts of the stream. Pins their number, `most`, if
    machines may come."""
    train = run.config.train
    size = train.global_batch_size or train.local_batch_size * data_ranks
    if train.data_parts is not None and size % train.data_parts:
        raise unshared(size, train.data_parts)
    if train.data_parts is None and most is not None:
        run.set("train.data_parts", most)


def _with_typed_options(run: Run) -> Config:
    """The config with all options of the plugins that it selects beside strategies; makes each of them once.

    Raises PlaitError, naming the key, for one that cannot be made.
    """
    for kind in KINDS.values():
        if kind.node and kind.name != "strategy":
            node, _, field = kind.node.partition(".")
            part = getattr(run.config, node)
            made = create_all(getattr(part, field) if field else part, kind.name)
            run.set(kind.node, {name: _options(each) for name, each in made.items()})
    create_all(selected(run.config), "sink")
    if run.config.schedule.shape:
        steps = run.config.train.steps
        for step in sorted({0, steps // 2, steps - 1}):
            learning_rate(run.config.schedule, 1.0, step, steps)
    return run.config


def _options(made: Any) -> dict[str, Any]:
    """The options of a plugin as plain values; what it keeps for itself, in fields with init=False, is none."""
    values = {field.name: getattr(made, field.name) for field in attrs.fields(type(made)) if field.init}
    return {name: attrs.asdict(value) if attrs.has(type(value)) else value for name, value in values.items()}


def _check_model(config: Config, model: Any, spec: ModelSpec) -> None:
    longest = _model_option(config, model, "max_seq_len")
    if longest is not None and config.train.seq_len > longest:
        raise PlaitError(
            f"train.seq_len={config.train.seq_len} is longer than the model's: model.max_seq_len={longest}; "
            f"set at most train.seq_len={longest}"
        ).at("train.seq_len", config.train.seq_len, fits=f"at most {longest}")
    precision = config.precision
    if precision.rounding == "stochastic" and precision.storage != "bfloat16":
        raise PlaitError(
            f"precision.rounding=stochastic is for parameters in bfloat16, and precision.storage={precision.storage}"
        ).at("precision.rounding", "stochastic", fits="nearest, or precision.storage=bfloat16")
    if (precision.optimizer or precision.storage == "bfloat16") and hasattr(
        target_of(config.optimizer, "optimizer"), "begin"
    ):
        key = "optimizer" if precision.optimizer else "storage"
        value, target = getattr(precision, key), config.optimizer["_target_"]
        raise PlaitError(
            f"precision.{key}={value}: {target} keeps a mean of weights, whose small steps need more digits; take "
            f"precision.{key}={'null' if precision.optimizer else 'float32'}"
        ).at(f"precision.{key}", value, fits=(None,) if precision.optimizer else ("float32", "float64"))
    check_rate(config.optimizer)
    check_optimizer(config.optimizer, groups_of([model], spec))


def _model_option(config: Config, model: Any, key: str) -> Any:
    """The option model.<key>, or what the model itself says if it has no such option."""
    return config.model.get(key, getattr(model, key, None))


def _check_validation(config: Config, held_out: bool) -> None:
    validation, conf = config.validation, config.checkpoint
    if validation.interval and not held_out:
        raise PlaitError(
            f"validation.interval={validation.interval}, but no data is held out; set validation.interval=0, or hold "
            "data out (data.validation_path, data.validation_fraction, data.validation_split)"
        ).at("validation.interval", validation.interval, fits=(0,))
    asked = {"checkpoint.keep_best": conf.keep_best or None, "validation.patience": validation.patience}
    for key, value in asked.items():
        if value is not None and not validation.interval:
            raise PlaitError(f"{key}={in_yaml(value)} goes by the validation loss, but validation.interval=0").at(
                "validation.interval", 0, fits="at least 1"
            )
        if value is not None and not conf.enabled:
            raise PlaitError(f"{key}={in_yaml(value)} keeps the best checkpoint, but checkpoint.enabled=false").at(
                "checkpoint.enabled", False, fits=(True,)
            )


def _check_backend(config: Config) -> None:
    if config.compile.enabled:
        from plait.system.torch_internals.compiler import backends

        known = backends()
        if config.compile.backend not in known:
            close = near_miss(config.compile.backend, known)
            raise PlaitError(
                f"unknown compile.backend={config.compile.backend}; available: {', '.join(known)}{close}"
            ).at("compile.backend", config.compile.backend, fits=known)


def _check_profile(config: Config, world_size: int, device_type: str) -> None:
    profile = config.profile
    if not profile.enabled:
        return
    if not profile.ranks:
        raise PlaitError("profile.ranks=[] names no rank to trace, but profile.enabled=true").at(
            "profile.ranks", (), fits=f"ranks from 0 to {world_size - 1}"
        )
    if outside := [rank for rank in profile.ranks if rank not in range(world_size)]:
        raise PlaitError(f"profile.ranks={profile.ranks} names rank {outside[0]}; ranks are 0 to {world_size - 1}").at(
            "profile.ranks", profile.ranks, fits=f"ranks from 0 to {world_size - 1}"
        )
    if profile.memory and device_type != "cuda":
        raise PlaitError("profile.memory=true takes snapshots of a GPU's memory, but the run is on a CPU").at(
            "profile.memory", True, fits=(False,)
        )


def _guess(config: Config, device_type: str) -> int:
    """The world size that strategies are shown first: what is asked for, else everything that this machine offers."""
    asked = config.launch.nproc_per_node
    if asked == "auto":
        return (2 if device_type == "cpu" else torch.accelerator.device_count()) * config.launch.most
    if type(asked) is not int or asked < 1:
        raise misfit("launch.nproc_per_node", asked, "'auto' or a number of at least 1")
    return asked * config.launch.most
