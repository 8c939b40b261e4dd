"""`python -m plait`: the command, by the interpreter that is meant."""

from plait.cli import main

main()
