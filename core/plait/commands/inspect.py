"""`plait inspect`: shows what a run would set up, on a fake process group and without starting a rank."""

import itertools
import re
from collections import namedtuple
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.commands.arguments import Parser
    from plait.contract.config import Config

Row = tuple[str, str, str, str, str]
# Of a parameter: its line; its bytes in all and on a rank; which options the optimizer has for it, None: it is frozen.
Param = namedtuple("Param", "row whole held choice")
BLOCK = re.compile(r"(.*?\.)(\d+)\.(.*)")  # an FQN with the number of a block

help = "show what a run would set up, without starting it"


def arguments(parser: "Parser") -> None:
    parser.description = """\
Shows, for the overrides of `plait train`, what the run will do: the order of the strategies and why, the mesh, and
every parameter with its logical axes, shape, placements and bytes per rank; equal blocks are shown once; and which
parameters the optimizer updates with options of their own.
If the model derives its spec itself, it shows how. Nothing is started and no memory is used."""
    parser.take_overrides()
    parser.take_world()


def run(args: "Namespace") -> int:
    from plait.commands.arguments import overrides_of
    from plait.compose.compose import compose

    print(report(compose(overrides_of(args)), args.world))
    return 0


def report(config: "Config", world_size: int | None = None) -> str:
    """The text that `plait inspect` prints for the run of `config`."""
    from plait.check.check import check
    from plait.parallel.apply import set_up
    from plait.parallel.assembly import assemble
    from plait.parallel.simulated import simulated

    checked = check(config, world_size)
    world, stages = checked.layout.world_size, checked.layout.count("layers")
    held: list[list[Param]] = []
    for index in range(stages):  # ranks that divide the layers hold different parameters
        assembly = (
            checked.assembly
            if not index
            else assemble(checked.config, world, device_type=checked.assembly.run.device_type)
        )
        with simulated(world, index * world // stages):
            held.append(_parameters(set_up(assembly, fill=False)))
    return "\n".join(_lines(checked, held))


def _parameters(applied: Any) -> list[Param]:
    """What rank 0 of those with these stages holds."""
    from torch.distributed.tensor import DTensor

    from plait.parallel.state import canonical
    from plait.train.option_groups import options_and_rules

    _, rules = options_and_rules(applied.run.config.optimizer)
    choices: dict[str, Any] = {}
    for group in applied.groups():
        choices |= dict(zip(group["names"], rules.choices(group), strict=True))
    rows = []
    for part in applied.parts:
        for fqn, param in part.named_parameters():
            sharded = isinstance(param, DTensor)
            local = (param.to_local() if sharded else param).numel() * param.element_size()
            axes = ", ".join(str(a) for a in applied.spec.axes_of(fqn))
            place = _placements(param) if sharded else "-"
            row = (fqn, f"({axes})", "x".join(map(str, param.shape)) or "()", place, f"{local:,}")
            rows.append(Param(row, param.numel() * param.element_size(), local, choices.get(canonical(fqn))))
    return rows


def _lines(checked: Any, held: list[list[Param]]) -> list[str]:
    from plait.contract.config import accumulation
    from plait.records.text import table
    from plait.strategies.registry import described
    from plait.train.option_groups import options_and_rules

    config, layout, run, hooks = checked.config, checked.layout, checked.assembly.run, checked.assembly.hooks
    data_ranks = layout.count("batch")
    micro = accumulation(config, data_ranks)
    samples = micro * data_ranks * config.train.local_batch_size
    lines = [f"model     {config.model['_target_']}, {run.parameters:,} parameters"]
    lines += [f"ranks     {layout.world_size} on {run.device_type}"]
    lines += [
        f"batch     {samples} samples of {config.train.seq_len} tokens: "
        f"{data_ranks} data ranks x {micro} x {config.train.local_batch_size}"
    ]
    lines += ["", "strategies, in the order in which they act"]
    lines += [f"  {i}. {described(p.name)}: {p.reason}" for i, p in enumerate(hooks.turns, 1)] or ["  none"]
    lines += [f"  {role}: {name}" for role, name in hooks.roles.items()]
    lines += ["", "mesh, outermost axis first"]
    axes = [
        (title, axis.name, str(axis.degree), _divided_by(axis), f"({layout.owner.get(axis.name, 'left over')})")
        for title, its in [("dense", layout.dense), *layout.views.items()]
        for axis in its
    ]
    lines += table(axes, left=(0, 1, 3, 4), indent="  ") if axes else ["  one rank, no axes"]
    every = {param.row[0]: param for stage in held for param in stage}
    ordered = [every[fqn] for fqn in dict.fromkeys([*run.shapes, *every]) if fqn in every]
    head: Row = ("parameter", "axes", "shape", "placements", "bytes per rank")
    rows = [head, *_equal_once([param.row for param in ordered])]
    lines += ["", *table(rows)]
    whole = sum(param.whole for param in ordered)
    each = [
        f"{sum(param.held for param in stage):,} on rank {i * layout.world_size // len(held)}"
        for i, stage in enumerate(held)
    ]
    lines += ["", f"parameters: {whole:,} bytes in all, {', '.join(each)}"]
    lines += ["", *_optimizer(*options_and_rules(config.optimizer), ordered)]
    derived: dict[str, str] = getattr(checked.assembly.model, "derived", dict)()
    lines += ["", "how the spec was derived", *(f"  {key}: {how}" for key, how in derived.items())] if derived else []
    return lines


def _divided_by(axis: Any) -> str:
    return f"splits {axis.splits}" if axis.splits else f"shards {', '.join(axis.shards) or 'nothing'}"


def _optimizer(node: dict[str, Any], rules: Any, every: list[Param]) -> list[str]:
    """The optimizer's options, and which of these parameters have others."""

    def said(options: Any) -> str:
        return ", ".join(f"{key} {value}" for key, value in options.items() if value is not None)

    lines = [f"optimizer {node['_target_']}: {said({**node, '_target_': None})}"]
    trained = [param.choice for param in every if param.choice]
    for choice in dict.fromkeys(trained):
        if own := rules.options(choice):
            who = [choice[0]] * bool(choice[0]) + ["norms and biases"] * choice[1]
            lines.append(f"  {trained.count(choice)} of {len(trained)} parameters, {', '.join(who)}: {said(own)}")
    return lines


def _equal_once(rows: list[Row]) -> list[Row]:
    """`rows`, with neighbouring blocks that differ only in their number shown once: `layers.0 to layers.31, each`."""
    blocks: list[tuple[str, int, list[Row]]] = []  # prefix, number, a block's rows without these
    for fqn, *rest in rows:
        found = BLOCK.fullmatch(fqn)
        prefix, number, name = found.groups() if found else ("", "-1", fqn)
        row: Row = (name, *rest)  # type: ignore[assignment]
        if blocks and blocks[-1][:2] == (prefix, int(number)):
            blocks[-1][2].append(row)
        else:
            blocks.append((prefix, int(number), [row]))
    shown: list[Row] = []
    for (prefix, _, same), alike in itertools.groupby(blocks, key=lambda block: (block[0], block[1] < 0, block[2])):
        numbers = [number for _, number, _ in alike]
        if len(numbers) == 1:
            shown += [(f"{prefix}{numbers[0]}.{row[0]}", *row[1:]) for row in same] if prefix else same
        else:
            shown.append((f"{prefix}{numbers[0]} to {prefix}{numbers[-1]}, each", "", "", "", ""))
            shown += [(f"  {row[0]}", *row[1:]) for row in same]
    return shown


def _placements(param: Any) -> str:
    names = param.device_mesh.mesh_dim_names or ()
    return ", ".join(f"{name}: {_short(p)}" for name, p in zip(names, param.placements, strict=True))


def _short(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    strided = f" strided by {placement.split_factor}" if hasattr(placement, "split_factor") else ""
    return f"S({placement.dim}){strided}" if placement.is_shard() or strided else str(placement)
