"""`plait report`: one page, and pictures, of runs and sweeps."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from plait.host import Parser

help = "make one page of curves and tables from runs and sweeps"
SECONDS = 10


def arguments(parser: "Parser") -> None:
    from pathlib import Path

    from plait.host import whole

    parser.description = """\
Shows runs on one page: their curves, how each ended, where their configs differ, their meshes and environments."""
    parser.add_argument(
        "folders", metavar="DIR", nargs="+", type=Path, help="a run's folder, a sweep's, or one that contains some"
    )
    page = "the page (default: report.html); one file that opens without a server or a network"
    parser.add_argument("--out", metavar="PAGE.html", type=Path, default=Path("report.html"), help=page)
    parser.add_argument("--png", metavar="FOLDER", type=Path, help="also the curves as pictures")
    watch = f"rewrite it every {SECONDS} (or SECONDS) seconds until all runs have ended; the open page reloads"
    seconds = whole("--watch", f"a whole number of seconds, such as --watch={SECONDS}", least=1)
    parser.add_argument("--watch", metavar="SECONDS", nargs="?", const=SECONDS, type=seconds, help=watch)


def run(args: "Namespace") -> int:
    folders, out, png, watch = args.folders, args.out, args.png, args.watch
    from plait_report import page, pictures

    page.check_library()
    if png is not None:
        pictures.check_library()
    until = f", written every {watch} seconds until all runs have ended" if watch else ""
    live = _write(folders, out, png, watch)
    print(f"report: {out}{until}", flush=True)
    while live and watch is not None:
        time.sleep(watch)
        live = _write(folders, out, png, watch)
    return 0


def _write(folders: "list[Path]", out: "Path", png: "Path | None", watch: int | None) -> bool:
    """Returns whether a run is still running."""
    from plait.host import replace, writing
    from plait_report.charts import charts
    from plait_report.page import page
    from plait_report.pictures import draw
    from plait_report.recorded import recorded

    runs = recorded(folders)
    live = any(run.state == "running" for run in runs)
    with writing(out, "the report"):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace(out, page(runs, watch if live else None))
    if png is not None:
        with writing(png, "the pictures"):
            draw(charts(runs), png)
    return live
