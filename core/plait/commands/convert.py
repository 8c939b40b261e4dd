"""`plait convert`: converts files of weights from Hugging Face's form to Plait's and back."""

import sys
from pathlib import Path
from types import TracebackType

from plait.contract.errors import PlaitError
from plait.records.text import quantity

HELP = """usage: plait convert SOURCE TARGET --to hf|plait [model=NAME] [model.KEY=VALUE ...]

Writes the weights in SOURCE, in the other form, to the new folder TARGET. The model is composed as for `plait train`:
it must be the model of these weights, and a config.json in SOURCE is compared with it.
  SOURCE      a folder of .safetensors files, with or without an index, or one such file; with --to hf also a
              checkpoint of Plait (runs/NAME/checkpoints/step-N)
  TARGET      a folder that does not exist yet; it appears when it is complete
  --to hf     safetensors and config.json, as Hugging Face's from_pretrained loads them
  --to plait  safetensors that `plait train checkpoint.init_from=TARGET` starts from

Example: plait convert downloads/Qwen3-0.6B weights/qwen3 --to plait model=qwen3_0.6b"""


def main(argv: list[str]) -> int:
    if not argv or any(a in ("-h", "--help") for a in argv):
        print(HELP)
        return 0 if argv else 1
    source, target, to, overrides = parsed(argv)
    from plait.compose.build import build_model
    from plait.host import compose

    model, _ = build_model(compose(overrides).model)
    from plait.convert import convert

    with Shown() as shown:
        folder = convert(model, source, target, to, progress=shown.update)
    print(f"{folder}: {quantity(shown.total)}B in {len(list(folder.glob('*.safetensors')))} file(s)")
    return 0


def parsed(argv: list[str]) -> tuple[Path, Path, str, list[str]]:
    """Source, target, form and overrides. Raises PlaitError if one of the first three is missing."""
    rest, to = [], None
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--to":
            to = next(arguments, "")
        elif argument.startswith("--to="):
            to = argument.removeprefix("--to=")
        else:
            rest.append(argument)
    if to is None:
        raise PlaitError("plait convert needs --to hf or --to plait: the form to convert to").at(
            "--to", fits=("hf", "plait")
        )
    if to not in ("hf", "plait"):
        raise PlaitError(f"--to={to} is an unknown form; available: hf, plait").at("--to", to, fits=("hf", "plait"))
    if len(rest) < 2 or any(a.startswith(("-", "+", "model=", "model.")) for a in rest[:2]):
        raise PlaitError("plait convert takes SOURCE and TARGET first, then overrides such as model=llama3_1b")
    flags = [a for a in rest[2:] if a.startswith("-") and a not in ("--config-dir", "-cd")]
    if flags:
        raise PlaitError(f"plait convert takes --to, overrides and --config-dir; {flags[0]} is for plait train")
    return Path(rest[0]), Path(rest[1]), to, rest[2:]


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
