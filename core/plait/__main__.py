"""`python -m plait`: the command, by the interpreter that is meant."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # the current folder, put there by `-m`; last, so that its files hide nothing

from plait.commands.main import main

main()
