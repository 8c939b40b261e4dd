"""`plait report`: one page, and pictures, of runs and sweeps."""

import time
from typing import TYPE_CHECKING

from plait import misfit

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from plait.host import Parser
    from plait_report.recorded import Recorded

help = "make one page of curves and tables from runs and sweeps"
SECONDS = 10


def arguments(parser: "Parser") -> None:
    from pathlib import Path

    from plait.host import whole

    parser.description = """\
Shows runs on one page: their curves, how each ended, where their configs differ, their meshes and environments."""
    parser.add_argument(
        "folders",
        metavar="DIR",
        nargs="+",
        type=Path,
        help="a run or its name, a sweep, or a folder that contains some",
    )
    page = "the page (default: report.html); one file that opens without a server or a network"
    parser.add_argument("--out", metavar="PAGE.html", type=_page, default=Path("report.html"), help=page)
    parser.add_argument("--png", metavar="FOLDER", type=Path, help="also the curves as pictures")
    watch = (
        f"show it live: serve it to this machine, and rewrite it every {SECONDS} (or SECONDS) seconds, until all end"
    )
    seconds = whole("--watch", f"a whole number of seconds, such as --watch={SECONDS}", least=1)
    parser.add_argument("--watch", metavar="SECONDS", nargs="?", const=SECONDS, type=seconds, help=watch)
    parser.add_argument(
        "--port", metavar="N", type=_port, default=0, help="where --watch serves it (default: a free one)"
    )


def run(args: "Namespace") -> int:
    folders, out, png, watch = args.folders, args.out, args.png, args.watch
    from plait_report import page, pictures
    from plait_report.recorded import going_on, recorded
    from plait_report.serve import Server

    page.check_library()
    if png is not None:
        pictures.check_library()
    runs = recorded(folders)
    if not watch or not going_on(runs):
        _write(runs, out, png)
        print(f"report: {out}{'; no run is going on' if watch else ''}", flush=True)
        return 0
    server = Server(args.port)
    server.show(_write(runs, out, png, watch))
    print(f"report: {out}, and live at {server.address} until all runs have ended", flush=True)
    live = True
    while live:
        time.sleep(watch)
        runs = recorded(folders)
        live = going_on(runs)
        server.show(_write(runs, out, png, watch if live else None))
    server.close(watch)
    return 0


def _page(text: str) -> "Path":
    from pathlib import Path

    if Path(text).suffix.lower() != ".html":
        raise misfit("--out", text, "the name of a page, which ends in .html, such as report.html")
    return Path(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise misfit("--port", text, "the number of a port, at most 65535, such as 8000, or 0 for a free one")
    return int(text)


def _write(runs: "list[Recorded]", out: "Path", png: "Path | None", refresh: int | None = None) -> str:
    """Returns the page."""
    from plait.host import replace, writing
    from plait_report.charts import charts
    from plait_report.page import page
    from plait_report.pictures import draw

    whole = page(runs, refresh)
    with writing(out, "the report"):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace(out, whole)
    if png is not None:
        with writing(png, "the pictures"):
            draw(charts(runs), png)
    return whole
