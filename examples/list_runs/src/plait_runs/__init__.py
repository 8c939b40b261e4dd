"""`plait runs`: one line for each run in a folder, the one with the lowest loss first."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from pathlib import Path

help = "list the runs of a folder, with their last losses"


def arguments(parser: "ArgumentParser") -> None:
    parser.description = "Lists the runs in a folder, that with the lowest loss first: how each ended, steps, losses."
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="runs", help="where to look; default: runs")


def run(args: "Namespace") -> int:
    from pathlib import Path

    import rich.box
    from rich.console import Console
    from rich.table import Table

    from plait import PlaitError

    folder = Path(args.folder)
    if not folder.is_dir():
        raise PlaitError(f"{folder} is no folder; take one that holds runs, such as runs")
    rows = [row_of(each) for each in sorted(folder.iterdir()) if (each / "metrics.jsonl").exists()]
    table = Table("run", "ended", "step", "loss", "validation", box=rich.box.SIMPLE_HEAD)
    for row in sorted(rows, key=lambda row: row.get("val_loss", row.get("loss", float("inf")))):
        losses = [f"{row[key]:.4f}" if row.get(key) is not None else "-" for key in ("loss", "val_loss")]
        table.add_row(row["run"], row["ended"], str(row.get("step", 0)), *losses)
    Console(width=120, highlight=False).print(table if rows else f"no runs in {folder}")
    return 0


def row_of(folder: "Path") -> dict[str, Any]:
    """The last row of a run's metrics, its last validation, and how it ended; "running" if it has not."""
    import json

    from plait.host import metrics

    rows = metrics.read(folder / metrics.FILE)
    validations = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    outcome = folder / "outcome.json"
    ended = json.loads(outcome.read_text(encoding="utf-8"))["kind"] if outcome.exists() else "running"
    last = rows[-1] if rows else {}
    return {**last, **({"val_loss": validations[-1]} if validations else {}), "run": folder.name, "ended": ended}
