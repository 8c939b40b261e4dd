"""A console that cannot show a character never ends a command."""

import os
import subprocess
import sys

import pytest

ASCII, COMPARE = {"PYTHONIOENCODING": "ascii"}, ["compare", "日本", "日本"]
OF_THE_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("env", "arguments"),
    [
        (ASCII, COMPARE),
        ({"PYTHONIOENCODING": "latin-1"}, COMPARE),
        (OF_THE_LOCALE, COMPARE),
        (ASCII, ["report", "日本"]),
        (OF_THE_LOCALE, ["inspect", "model=日本"]),
    ],
)
def test_what_it_cannot_show_is_shown_in_another_way(tmp_path, env, arguments):
    done = subprocess.run(
        [sys.executable, "-m", "plait", *arguments], capture_output=True, env={**os.environ, **env}, cwd=tmp_path
    )
    assert done.returncode == (2 if arguments[0] == "compare" else 1)
    assert b"UnicodeEncodeError" not in done.stderr
    assert rb"\u65e5\u672c" in done.stderr or rb"\udce6\udc97\udca5" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_nor_does_standard_output(tmp_path, encoding):
    program = (
        "import sys\n"
        "from plait.system.streams import console_may_fail\n"
        "with console_may_fail(print):\n"
        "    print('日本')\n"
        "    print('日本', file=sys.stderr)\n"
    )
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rb"\u65e5\u672c" in done.stdout
    assert rb"\u65e5\u672c" in done.stderr
