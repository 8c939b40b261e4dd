"""What is noted of an `os._exit`, in an interpreter of its own, since it ends that."""

import subprocess
import sys

import pytest

FOREIGN = """
import os
from plait.system.exits import exits_noted

with exits_noted(lambda status, caller: print(status, caller.f_code.co_name, flush=True)):
    def give_up():
        os._exit(7)
    {call}
print("went on")
"""


@pytest.mark.parametrize(
    ("call", "said", "code"), [("give_up()", "7 give_up\n", 7), ("pass", "went on\n", 0)], ids=["ends", "does not end"]
)
def test_an_exit_is_noted_and_ends_the_process(call, said, code):
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN.format(call=call)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert (done.stdout, done.returncode) == (said, code)
