"""`plait convert`: converts files of weights from Hugging Face's form to Plait's and back."""

import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from plait import PlaitError

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Parser

OVERRIDE = re.compile(r"\+|model[.=]")
help = "convert weights from Hugging Face's form to Plait's, and back"


def arguments(parser: "Parser") -> None:
    from plait.host import one_of

    parser.description = """\
Writes the weights in SOURCE, in the other form, to the new folder TARGET. The model is composed as for `plait train`:
it must be the model of these weights, and a config.json in SOURCE is compared with it."""
    source = """a folder of .safetensors files, with or without an index, or one such file; with --to hf also a
        checkpoint of Plait (runs/NAME/checkpoints/step-N)"""
    parser.add_argument("source", metavar="SOURCE", help=source)
    target = "a folder that does not exist yet; it appears when it is complete"
    parser.add_argument("target", metavar="TARGET", help=target)
    form = """hf: safetensors and config.json, as Hugging Face's from_pretrained loads them; plait: safetensors that
        `plait train checkpoint.init_from=TARGET` starts from"""
    parser.add_argument("--to", metavar="hf|plait", required=True, type=one_of("--to", "hf", "plait"), help=form)
    parser.take_overrides()
    parser.epilog = "Example: plait convert downloads/Qwen3-0.6B weights/qwen3 --to plait model=qwen3_0.6b"


def run(args: "Namespace") -> int:
    from pathlib import Path

    from plait.host import build_model, compose, overrides_of

    if early := next((path for path in (args.source, args.target) if OVERRIDE.match(path)), None):
        raise PlaitError(f"plait convert takes SOURCE and TARGET first, then overrides such as {early}").at(early)

    model, _ = build_model(compose(overrides_of(args)).model)
    from plait.host import text
    from plait_models.convert import convert

    with Shown() as shown:
        folder = convert(model, Path(args.source), Path(args.target), args.to, progress=shown.update)
    print(f"{folder}: {text.quantity(shown.total)}B in {len(list(folder.glob('*.safetensors')))} file(s)")
    return 0


class Shown:
    """Progress: a bar on a terminal, else a line for each tenth."""

    def __init__(self) -> None:
        self.total = 0
        self._tenths = 0
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("reading", total=None)

    def __enter__(self) -> "Shown":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, file: str, done: int, total: int) -> None:
        self.total = total
        if self._bar is not None:
            self._bar.update(self._task, description=file, completed=done, total=total)
        elif 10 * done // max(total, 1) > self._tenths:
            self._tenths = 10 * done // total
            print(f"{done / total:4.0%}  {file}", file=sys.stderr, flush=True)
