"""What takes long says so, and how long it has taken."""

import re
import threading

from plait.system.streams import said_so_far


def test_lines_come_until_it_has_ended() -> None:
    lines: list[str] = []
    two = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) > 1:
            two.set()

    with said_so_far("check: a", say, every=0.001):
        assert two.wait(60)
    assert all(re.fullmatch(r"check: a: \d+ s so far", line) for line in lines)
    assert "plait-so-far" not in {thread.name for thread in threading.enumerate()}
