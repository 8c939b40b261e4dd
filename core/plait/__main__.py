"""`python -m plait`: the command, with this interpreter."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # the current folder, which `-m` put first; last, so that its files hide no module

from plait.commands.main import main

main()
