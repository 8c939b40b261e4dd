"""`plait inspect`: shows what a run would set up, on a fake process group and without starting a rank."""

import itertools
import re
import sys
from typing import Any

Row = tuple[str, str, str, str, str]
BLOCK = re.compile(r"(.*?\.)(\d+)\.(.*)")  # an FQN with the number of a block

HELP = """usage: plait inspect [overrides] [world=N]

Shows, for the overrides of `plait train`, what the run will do: the order of the strategies and why, the mesh, and
every parameter with its logical axes, shape, placements and bytes per rank; equal blocks are shown once.
Nothing is started and no memory is used.
  world=N  the number of ranks (default: what the degrees and launch.* ask for)"""


def main(argv: list[str]) -> int:
    if any(a in ("-h", "--help") for a in argv):
        print(HELP)
        return 0
    from plait.launch.compose import asked, resolve

    overrides, world = asked(argv, "inspect")
    print(report(resolve(overrides), world), file=sys.stdout)
    return 0


def report(node: dict[str, Any], world_size: int | None = None) -> str:
    """The text that `plait inspect` prints for the resolved config `node`."""
    from plait.launch.check import check
    from plait.parallel.simulated import simulated

    checked = check(node, world_size)
    with simulated(checked.layout.world_size):
        return "\n".join(_lines(checked))


def _lines(checked: Any) -> list[str]:
    from torch.distributed.tensor import DTensor

    from plait.contract.config import accumulation
    from plait.parallel.apply import set_up
    from plait.strategies.registry import described

    config, layout, run = checked.config, checked.layout, checked.assembly.run
    applied = set_up(checked.assembly, fill=False)
    shares = layout.count("batch")
    micro = accumulation(config, shares)
    samples = micro * shares * config.train.local_batch_size
    lines = [f"model     {config.model['_target_']}, {run.parameters:,} parameters"]
    lines += [f"ranks     {layout.world_size} on {run.device_type}"]
    lines += [
        f"batch     {samples} samples of {config.train.seq_len} tokens: "
        f"{shares} shares x {micro} x {config.train.local_batch_size}"
    ]
    lines += ["", "strategies, in the order in which they act"]
    lines += [f"  {i}. {described(p.name)}: {p.reason}" for i, p in enumerate(applied.hooks.turns, 1)] or ["  none"]
    lines += [f"  {role}: {name}" for role, name in applied.hooks.roles.items()]
    lines += ["", "mesh, outermost axis first"]
    for title, axes in [("dense", layout.dense), *layout.views.items()]:
        for axis in axes:
            what = f"splits {axis.splits}" if axis.splits else f"shards {', '.join(axis.shards) or 'nothing'}"
            lines.append(
                f"  {title:<10} {axis.name:<14} {axis.degree:>5}  {what}  ({layout.owner.get(axis.name, 'left over')})"
            )
    lines += [] if layout.dense else ["  one rank, no axes"]
    rows: list[Row] = []
    whole = held = 0
    for part in applied.parts:
        fqn: str
        param: Any
        for fqn, param in part.named_parameters():
            sharded = isinstance(param, DTensor)
            local = (param.to_local() if isinstance(param, DTensor) else param).numel() * param.element_size()
            whole, held = whole + param.numel() * param.element_size(), held + local
            axes = ", ".join(str(a) for a in run.spec.axes_of(fqn))
            place = _placements(param) if sharded else "-"
            rows.append((fqn, f"({axes})", "x".join(map(str, param.shape)) or "()", place, f"{local:,}"))
    rows = [("parameter", "axes", "shape", "placements", "bytes per rank"), *_equal_once(rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines += ["", *("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)]
    lines += ["", f"parameters: {whole:,} bytes in all, {held:,} on rank 0"]
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
