"""`plan`: what one step costs per rank, from a run's config, a number of ranks and a cluster."""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from plait import Cluster, Config, PlaitError
from plait.host import Assembly, Checked, check
from plait_plan.cannot import in_words
from plait_plan.memo import Memo
from plait_plan.roofline import Spent, spend
from plait_plan.summary import plan_of, time_of
from plait_plan.tracing.blocks import groups
from plait_plan.tracing.kept import depends_on, steps
from plait_plan.tracing.trace import StepTrace
from plait_plan.values import Plan, Time
from plait_plan.whole import Whole, whole

if TYPE_CHECKING:
    from plait_plan.stages.divided import Divided


def plan(config: Config, world: int | None = None, rank: int | None = None, every: bool = False) -> Plan:
    """The cost of one step per rank, for the run of `config` on its cluster.

    world: number of ranks; None: as many as the config asks for. rank: the rank to simulate; None: the one that holds
    most. every: trace all blocks, even equal ones. Raises PlaitError for what does not fit or cannot be planned.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns about collectives that are known
    cluster = Cluster.of(config.cluster)
    notes: list[str] = []
    checked = check(plannable(config, notes), world)
    if checked.config.compile.enabled and checked.assembly.hooks.implemented("compile"):
        checked = check(_without_compiler(checked.config, notes), world)
    notes += [details or line for line, details in checked.said]
    size = checked.layout.world_size
    if rank is not None and not 0 <= rank < size:
        raise PlaitError(f"rank={rank} is not among the {size} ranks of world={size}; ranks are 0 to {size - 1}").at(
            "rank", rank, fits=f"0 to {size - 1}"
        )
    # Parameters are cut so that the first rank along an axis has the largest piece.
    given = (checked.config, checked.assembly, rank or 0, cluster, every, config.compile.enabled)
    if checked.layout.count("layers") > 1:  # imported only by plans that need it
        from plait_plan.stage_report import plan_of_stages

        return plan_of_stages(checked, stages_of(*given), rank, cluster, notes)
    found = step_of(*given)
    time = _time(checked, found, cluster) if cluster else None
    return plan_of(checked, found, rank or 0, cluster, notes, time)


def step_of(
    config: Config,
    assembly: Assembly,
    rank: int,
    cluster: Cluster | None,
    every: bool = False,
    compiled: bool = False,
) -> Whole:
    """The traced step of a run whose config has the strategies' final options; the same run is traced once.

    compiled: count the operators of a block that a compiler fuses as one.
    """
    granularity = cluster.granularity if cluster else 1

    def make() -> Whole:
        with in_words(config):
            return _traced(config, assembly, rank, granularity, every, compiled)

    return _once([granularity], config, assembly, [rank, every, compiled], make)


def stages_of(
    config: Config, assembly: Assembly, rank: int, cluster: Cluster | None, every: bool, compiled: bool
) -> "Divided":
    """The steps of all ranks that have a stage of what `rank` computes; the arguments are those of `step_of`."""
    from plait_plan.stages.divided import divided

    return _once([attrs.asdict(cluster) if cluster else None, "stages"], config, assembly, [rank, every, compiled],
                 lambda: divided(config, assembly, rank, cluster, every, compiled))  # fmt: skip


def _once(what: list[Any], config: Config, assembly: Assembly, given: list[Any], make: Callable[[], Any]) -> Any:
    """What `make` returns, or has returned for the same run."""
    return STEPS.once((what, depends_on(config), assembly.run.world_size, given), make)


STEPS = Memo[Any](64)


def _traced(config: Config, assembly: Assembly, rank: int, granularity: int, every: bool, compiled: bool) -> Whole:
    found = groups(assembly.model, assembly.run.spec, config.remat)
    sizes = [len(g.fqns) for g in found]

    def make(several: list[list[int] | None]) -> Iterator[StepTrace]:
        return steps(
            [(config, assembly.run.world_size, rank, granularity, counts, compiled, False) for counts in several]
        )

    return whole(make, sizes, every)


def plannable(config: Config, notes: list[str]) -> Config:
    """The config, changed so that a machine without the run's devices and without a compiler for C++ can run it."""
    changed = config.with_value("launch.device", "cpu").with_value("launch.nnodes", 1)
    if config.compile.enabled:
        if config.remat.mode == "budget":
            raise PlaitError(
                "remat.mode=budget lets a compiler choose what is kept, which no plan follows; plan full or selective"
            ).at("remat.mode", "budget", fits=("full", "selective"))
        if config.compile.backend != "inductor":
            changed = _without_compiler(changed, notes)
    return changed


def _without_compiler(config: Config, notes: list[str]) -> Config:
    """For a compiler other than inductor, and for a strategy that compiles in its own way."""
    notes.append(
        "memory is planned without compile.enabled and will be lower; for the time, fused operators count as one"
    )
    return config.with_value("compile.enabled", False)


def _time(checked: Checked, found: Whole, cluster: Cluster) -> Time:
    best, worst = ({t: spend(t, cluster, b) for t in _traces(found)} for b in (True, False))

    def total(spent: dict[Any, Spent], what: Any) -> float:
        return found.sum(lambda t: what(spent[t]))

    band = total(best, lambda s: s.step), total(worst, lambda s: s.step)
    compute = tuple(total(s, lambda x: x.products + x.memory) for s in (best, worst))
    exchange = tuple(total(s, lambda x: sum(x.sending.values())) for s in (best, worst))
    parts = {
        "matrix products": total(worst, lambda s: s.products),
        "memory bandwidth": total(worst, lambda s: s.memory),
    }
    for axis in {a for s in worst.values() for a in s.exposed}:
        parts[f"collectives over {axis}"] = total(worst, lambda s, axis=axis: s.exposed.get(axis, 0.0))
    return time_of(checked, found, cluster, band, compute, exchange, parts)  # type: ignore[arg-type]


def _traces(found: Whole) -> list[StepTrace]:
    return [found.base, *(t for t, _ in found.more)]
