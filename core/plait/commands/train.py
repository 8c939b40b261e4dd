"""`plait train`: its arguments are Hydra's, which also answers --help."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.commands.arguments import Parser

help = "train a model, or with -m sweep over overrides"


def arguments(parser: "Parser") -> None:
    from argparse import REMAINDER

    parser.add_argument("arguments", nargs=REMAINDER)


def run(args: "Namespace") -> int:
    from plait.commands.start import start

    return start(args.arguments)
