"""The text that every machine has."""

import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from plait import PlaitError
from plait_data import stdlib
from plait_data.stdlib import Stdlib, modules


def test_it_is_the_source_of_this_python() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    names = [file.path.relative_to(library).as_posix() for file in Stdlib().files()]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py", "unittest/mock.py"} <= set(names)
    assert not [
        name
        for name in names
        if name.startswith("test/") or "/tests/" in name or "site-packages" in name or name.startswith("idlelib")
    ]
    assert len(names) > 300


def test_it_trains_and_validates_at_once(said: list[str]) -> None:
    source = Stdlib()
    source.check(seq_len=256, vocab_size=257)
    source.prepare(said.append)
    source.check_length(seq_len=256)
    batches = source.open(seq_len=256, seed=0, global_batch_size=8, dp=(0, 1))
    assert source.has_validation
    assert source.indexable
    assert bytes(token for token in batches.train(0).tokens[0].tolist() if token < 256).decode("utf-8", "replace")
    assert batches.validation(3).tokens.shape == (8, 256)


def test_the_fingerprint_is_of_the_patch_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Stdlib().fingerprint()
    assert Stdlib().fingerprint() == here
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.99")
    assert Stdlib().fingerprint() != here


def test_what_is_left_out_and_the_limit(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.py", "b/c.py", "b/data.txt", "z.py", "d/test/e.py", "site-packages/f.py", "_sysconfigdata_x.py"):
        write(f"lib/{name}", "x" * 10)
    write("lib/empty.py", "")
    assert [file.path.name for file in modules(tmp_path / "lib")] == ["a.py", "c.py", "z.py"]
    monkeypatch.setattr(stdlib, "LIMIT", 25)
    assert [file.path.name for file in modules(tmp_path / "lib")] == ["a.py", "c.py"]
    with pytest.raises(PlaitError, match=r"no source files in .*data=text"):
        modules(tmp_path / "none")


@pytest.mark.parametrize(
    "make",
    [
        "from plait_data.stdlib import Stdlib; Stdlib().check(seq_len=8, vocab_size=257)",
        "from plait_data.stdlib import Stdlib; s = Stdlib(); s.prepare(print); s.check_length(seq_len=8); "
        "s.fingerprint()",
        "from plait_data.text import Text; Text(path=__import__('os').__file__).check(seq_len=8, vocab_size=257)",
        "from plait_data.hf import Hf; Hf(name='json', data_files='x').check(seq_len=8, vocab_size=257)",
    ],
)
def test_the_parent_imports_no_torch(make: str) -> None:
    code = f"import sys; {make}; print([name for name in ('torch', 'datasets') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
