"""Planted faults: Python imports this at its start, and it acts at the named point that PLAIT_FAULT describes.

PLAIT_FAULT is JSON: {"event": an audit event of Python, "match": a regex for its arguments, "nth": which match,
"do": the name of a signal or an errno, "who": "rank", "launcher" or "any", "once": a file that marks it as done}.
Nothing of Plait is replaced: an audit hook sees what the interpreter is about to do, and kills the process or lets the
call fail as the system would.
"""

import errno
import json
import os
import re
import signal
import sys
from typing import Any


def install(text: str | None = os.environ.get("PLAIT_FAULT")) -> None:
    if not text:
        return
    plan = json.loads(text)
    pattern, who, once = re.compile(plan["match"]), plan.get("who", "any"), plan["once"]
    seen, busy = 0, False

    def mine() -> bool:
        return who == "any" or who == ("rank" if "RANK" in os.environ else "launcher")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen, busy
        if event != plan["event"] or busy or not mine():
            return
        busy = True
        try:
            if not pattern.search(" ".join(map(str, args))) or os.path.exists(once):
                return
            seen += 1
            if seen < plan["nth"]:
                return
            os.close(os.open(once, os.O_CREAT | os.O_WRONLY))
        finally:
            busy = False
        if plan["do"].startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, plan["do"]))
        else:
            number = getattr(errno, plan["do"])
            raise OSError(number, os.strerror(number), str(args[0]) if args else None)

    sys.addaudithook(hook)


install()
