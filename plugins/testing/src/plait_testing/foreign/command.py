"""`plait verify FILE.py::function`: finds the user's comparison, runs it, and prints or writes what was found."""

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait import PlaitError

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Parser

TARGET = re.compile(r"(?P<file>.+\.py)::(?P<of_file>\w+)|(?P<module>[\w.]+):(?P<of_module>\w+)")


def arguments(parser: "Parser") -> None:
    """What `plait verify` takes beside the name of a function."""
    from plait.host import one_of

    fits = ("float64", "float32", "bfloat16")
    parser.add_value("dtype", "D", one_of("dtype", *fits), "float64, float32 or bfloat16, of FILE.py::function")
    parser.add_argument("--json", metavar="FILE", help="what FILE.py::function found, for programs")
    parser.add_argument("--sarif", metavar="FILE", help="the same for tools that show results beside code")


def run(args: "Namespace") -> int | None:
    """The exit code, if an argument names a function; else None."""
    named = [each for each in args.overrides if TARGET.fullmatch(each)]
    if not named:
        if given := [key for key in ("json", "sarif", "dtype") if getattr(args, key)]:
            raise PlaitError(f"{given[0]} is for plait verify FILE.py::function").at(given[0])
        return None
    target = named[0]
    if more := [each for each in args.overrides if each != target]:
        raise PlaitError(
            f"plait verify {target} takes no overrides, and got {more[0]}: the function says everything"
        ).at(more[0])
    if args.world is not None:
        raise PlaitError(f"plait verify {target} takes no world=: the mesh of its Comparison says it").at("world")
    return verify(target, args.dtype, args.json, args.sarif)


def verify(target: str, dtype: str | None = None, json: str | None = None, sarif: str | None = None) -> int:
    """Compare what `target` describes; json, sarif: files to write. Returns the exit code: 0 if all agrees, 1 if
    something is wrong. Raises PlaitError, with exit code 2, if nothing could be compared."""
    from plait_testing.foreign.report import NOT_COMPARED
    from plait_testing.pool import begin

    begin()  # it imports torch while this process imports the user's file
    try:
        function, file = _found(target)
        report = _compared(target, function, dtype)
    except PlaitError as error:
        error.exit_code = NOT_COMPARED
        raise
    from plait_testing.foreign.report import dumped

    print(report.text())
    _write(json, dumped(report.as_json()))
    line = inspect.getsourcelines(function)[1]
    _write(sarif, dumped(report.sarif(_relative(file), line)))
    return report.exit_code


def _found(target: str) -> tuple[Any, Path]:
    """The function that `target` names, and the file it is in."""
    match = TARGET.fullmatch(target)
    assert match is not None
    if match["file"]:
        path, name = Path(match["file"]), match["of_file"]
        if not path.is_file():
            raise PlaitError(f"there is no file {path}").at("target", target, fits="FILE.py::function")
        sys.path.insert(0, str(path.resolve().parent))  # ranks import it by its name
        module = _of_user(target, importlib.import_module, path.stem)
        if Path(str(module.__file__)).resolve() != path.resolve():
            raise PlaitError(
                f"{path} cannot be imported as {path.stem!r}, which is the module {module.__file__}: rename it"
            ).at("target", target)
    else:
        name, module = match["of_module"], _of_user(target, importlib.import_module, match["module"])
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise PlaitError(f"{target}: there is no function {name!r}; it has {', '.join(known) or 'none'}").at(
            "target", target, fits=known
        )
    return function, Path(str(module.__file__))


def _of_user(target: str, work: Callable[..., Any], *given: Any) -> Any:
    """What `work` returns. Raises PlaitError for what the user's code raises, with its place."""
    try:
        return work(*given)
    except PlaitError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if isinstance(error, SyntaxError | ImportError) else f" ({Path(at.filename).name}, line {at.lineno})"
        raise PlaitError(f"{target} raised {type(error).__name__}: {error}{place}").at("target", target) from error


def _compared(target: str, function: Any, dtype: str | None) -> Any:
    import attrs

    from plait_testing.foreign.compare import compare
    from plait_testing.foreign.subject import Comparison

    if given := [each.name for each in inspect.signature(function).parameters.values() if each.default is each.empty]:
        raise PlaitError(
            f"{target} wants {', '.join(given)}: name a function without arguments that returns a Comparison"
        ).at("target", target)
    comparison = _of_user(target, function)
    if not isinstance(comparison, Comparison):
        raise PlaitError(
            f"{target} returned {type(comparison).__name__}; it must return a plait.testing.Comparison"
        ).at("target", target, fits="Comparison")
    return compare(attrs.evolve(comparison, dtype=dtype) if dtype else comparison)


def _write(path: str | None, text: str) -> None:
    from plait.host import writing

    if path:
        with writing(Path(path)):
            Path(path).write_text(text, encoding="utf-8")


def _relative(file: Path) -> str:
    """As tools of CI want it: relative to the current folder, if it is below it."""
    here = Path.cwd()
    return (file.resolve().relative_to(here) if file.resolve().is_relative_to(here) else file.resolve()).as_posix()
