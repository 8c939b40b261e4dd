"""`plait compare A B`: where two runs part."""

from typing import TYPE_CHECKING

from plait import misfit

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Parser

help = "show the first step at which two runs differ"


def arguments(parser: "Parser") -> None:
    parser.description = "Shows the first step at which two runs differ, and the largest difference."
    parser.add_argument("a", metavar="A", help="a run or its name, or a metrics.jsonl")
    parser.add_argument("b", metavar="B", help="another one")
    tolerance = "relative difference of loss and grad_norm that exit code 0 allows"
    parser.add_argument("--tolerance", type=_tolerance, metavar="X", help=tolerance)
    parser.epilog = """\
Exit code: 0 if loss and grad_norm are bitwise equal at every common step (or within --tolerance), 1 where they differ,
2 where the files cannot be compared."""
    parser.exit_code = 2


def run(args: "Namespace") -> int:
    from plait_report.compared import compare, show

    compared = compare(args.a, args.b)
    show(compared, args.tolerance)
    return 0 if compared.agree(args.tolerance) else 1


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise misfit("--tolerance", text, "a number, 0 or more")
    return value
