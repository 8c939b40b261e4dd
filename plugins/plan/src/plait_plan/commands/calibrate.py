"""`plait calibrate`: measures this machine and writes a file for `cluster=NAME`."""

from typing import TYPE_CHECKING, Any

from plait import PlaitError, misfit

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Parser

help = "measure this machine, for cluster=NAME"

TEMPLATE = """\
# {title}, measured by `plait calibrate` with {ranks} ranks.
name: {title} # shown to people
device: {device} # torch's device type
devices: {devices} # regular expressions that match torch's name of the device
memory: {memory:.4e} # bytes, as the system reports{of_ranks}
reserved: {held:.4e} # bytes in use before there is a model, measured
granularity: {granularity} # bytes; {allocator}
products: # operations per second in matrix products, by dtype, measured, at the best size
{products}
bandwidth: {bandwidth:.4e} # bytes per second of memory, read and written, measured with copies and exponentials
node: {node} # ranks that share the inside links
inside: # links between this machine's ranks
  bandwidth: {link:.4e} # bytes per second that one rank sends, measured with the fastest kind of collective
  latency: {latency:.4e} # seconds per hop, measured with the smallest collectives
between: # links to other machines: NOT MEASURED, the same as inside; put your network's figures here
  bandwidth: {link:.4e} # bytes per second per rank
  latency: {latency:.4e} # seconds per hop
launch: {launch:.4e} # seconds of an operator on 16 elements, measured
achieved: # [low, high] share of the figures above that is reached, measured over sizes and kinds
  products: [{worst_products:.3f}, 1.0] # of `products`
  memory: [{worst_memory:.3f}, 1.0] # of `bandwidth`
  links: [{worst_links:.3f}, 1.0] # of both links
"""


def arguments(parser: "Parser") -> None:
    from plait.host import whole

    parser.description = """\
Measures this machine's devices and the links between them: copies, matrix products in each dtype, and all-reduce,
all-gather, reduce-scatter and all-to-all over sizes, on all ranks at once. Writes conf/cluster/NAME.yaml, which
`plait plan cluster=NAME` reads in this folder."""
    parser.add_value("name", "NAME", _name, "of the file (default: here)")
    ranks = whole("ranks", "a number of ranks, at least 1", least=1)
    parser.add_value("ranks", "N", ranks, "how many measure together (default: one for each GPU, or 2 on a CPU)")
    parser.add_value("device", "cpu|TYPE", str, "such as cuda (default: the type of this machine's GPUs, or cpu)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(args: "Namespace") -> int:
    from pathlib import Path

    name = args.name or "here"
    path = Path("conf/cluster") / f"{name}.yaml"
    if path.exists() and not args.force:
        raise PlaitError(f"{path} exists already; replace it with --force, or choose another name=NAME")
    device, ranks = _device(args.device, args.ranks)
    from plait.host import check_threads, replace, writing

    check_threads(ranks)
    text = written(measured(device, ranks), device, ranks)
    with writing(path.parent, "the folder of the file"):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, text)
    print(f"{text}\nwritten to {path}: plait plan cluster={name}")
    return 0


def measured(device: str, ranks: int, sizes: Any = None) -> Any:
    """Starts the ranks, and returns what rank 0 measured."""
    import tempfile
    from pathlib import Path

    import torch
    import torch.multiprocessing

    from plait_plan.calibrate import OF_A_CPU, OF_A_GPU, Measured, measure

    with tempfile.TemporaryDirectory(prefix="plait-calibrate-") as folder:
        arguments = (ranks, device, folder, sizes or (OF_A_CPU if device == "cpu" else OF_A_GPU))
        torch.multiprocessing.spawn(measure, arguments, nprocs=ranks)
        return Measured(**torch.load(Path(folder) / "measured", weights_only=True))


def written(found: Any, device: str, ranks: int) -> str:
    """The content of the file."""
    import re

    from plait_plan.calibrate import links

    link, latency, worst = links(found.sends, ranks) if found.sends else (found.bandwidth[0], 0.0, 1.0)
    gpu = device != "cpu"
    return TEMPLATE.format(
        title=found.name,
        ranks=ranks,
        device=device,
        devices=f"['{re.escape(found.name)}']" if gpu else "[]",
        memory=found.memory,
        of_ranks="" if gpu else f", over {ranks} ranks",
        held=found.held,
        granularity=512 if gpu else 1,
        allocator="torch's allocator rounds sizes up to this" if gpu else "malloc's rounding is not counted",
        products="\n".join(f"  {dtype}: {rates[0]:.4e}" for dtype, rates in found.products.items()),
        bandwidth=found.bandwidth[0],
        node=ranks if gpu else 1024,
        link=link,
        latency=latency,
        launch=found.launch,
        worst_products=min(low / high for high, low in found.products.values()),
        worst_memory=found.bandwidth[1] / found.bandwidth[0],
        worst_links=worst,
    )


def _name(name: str) -> str:
    if not name.isidentifier():
        raise misfit("name", name, "a name of letters, digits and underscores, such as name=here")
    return name


def _device(device: str | None, ranks: int | None) -> tuple[str, int]:
    import torch

    here = torch.accelerator.current_accelerator(check_available=True)
    device = device or (here.type if here else "cpu")
    if device not in ("cpu", here and here.type):
        fits = ("cpu", *([here.type] if here else []))
        sees = here.type if here else "no GPU"
        raise PlaitError(f"device={device}, but torch sees {sees} here; use device={' or '.join(fits)}").at(
            "device", device, fits=fits
        )
    gpus = torch.accelerator.device_count() if device != "cpu" else 0
    ranks = ranks or gpus or 2
    if gpus and ranks > gpus:
        raise PlaitError(f"ranks={ranks} need a GPU each, and there are {gpus}").at(
            "ranks", ranks, fits=f"at most {gpus}"
        )
    return device, ranks
