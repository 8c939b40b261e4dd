"""`plait report`: one page, and pictures, of runs and sweeps."""

import time
from pathlib import Path

from plait.contract.errors import PlaitError, misfit
from plait.system.disk import replace, writing

HELP = """usage: plait report DIR... [--out PAGE.html] [--png FOLDER] [--watch[=SECONDS]]

Shows runs on one page: their curves, how each ended, where their configs differ, their meshes and environments. Each
DIR is a run's folder, a sweep's, or contains some.
  --out PAGE.html    the page (default: report.html); one file that opens without a server or a network
  --png FOLDER       also the curves as pictures
  --watch[=SECONDS]  rewrite it every 10 (or SECONDS) seconds until all runs have ended; the open page reloads"""

SECONDS = 10


def main(argv: list[str]) -> int:
    if any(a in ("-h", "--help") for a in argv):
        print(HELP)
        return 0
    folders, out, png, watch = _arguments(argv)
    from plait.report import page, pictures

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


def _write(folders: list[Path], out: Path, png: Path | None, watch: int | None) -> bool:
    """Returns whether a run is still running."""
    from plait.report.charts import charts
    from plait.report.page import page
    from plait.report.pictures import draw
    from plait.report.recorded import recorded

    runs = recorded(folders)
    live = any(run.state == "running" for run in runs)
    with writing(out, "the report"):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace(out, page(runs, watch if live else None))
    if png is not None:
        with writing(png, "the pictures"):
            draw(charts(runs), png)
    return live


def _arguments(argv: list[str]) -> tuple[list[Path], Path, Path | None, int | None]:
    folders: list[Path] = []
    out, png, watch = Path("report.html"), None, None
    rest = list(argv)
    while rest:
        name, given, value = rest.pop(0).partition("=")
        if name in ("--out", "--png"):
            if not given and not rest:
                raise PlaitError(f"{name} needs a path, such as {name}=report").at(name)
            path = Path(value if given else rest.pop(0))
            out, png = (path, png) if name == "--out" else (out, path)
        elif name == "--watch":
            if given and not (value.isdigit() and int(value)):
                raise misfit(name, value, f"a whole number of seconds, such as --watch={SECONDS}")
            watch = int(value) if given else SECONDS
        elif name.startswith("-"):
            raise PlaitError(f"plait report has no option {name}; `plait report --help` explains its arguments")
        else:
            folders.append(Path(name + given + value))
    if not folders:
        raise PlaitError("plait report needs the folders of runs or sweeps, such as `plait report runs`")
    return folders, out, png, watch
