"""Helper processes: they never outlive the process that they help."""

import os
import select
import subprocess
import sys

import pytest

LEAVES_A_HELPER = """
import os, time
from plait.system.processes import killed_with_parent

begun, begin = os.pipe()
if os.fork() == 0:
    killed_with_parent()
    os.write(begin, b"x")
    time.sleep(5)
    os.write(1, b"still here")
    os._exit(0)
os.read(begun, 1)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process with its parent")
def test_a_helper_ends_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", LEAVES_A_HELPER], stdout=subprocess.PIPE) as parent:
        assert parent.wait() == 0
        assert parent.stdout is not None
        ended, _, _ = select.select([parent.stdout], [], [], 3)
        assert ended, "the helper still holds the parent's output"
        assert os.read(parent.stdout.fileno(), 99) == b""
