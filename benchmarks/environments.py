"""Environments of wheels for what `plait verify` is tried on: one for each project and release, made with pip once."""

import json
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import attrs

FOLDER = Path(__file__).parents[1] / "build" / "detectors"
TORCH = "torch==2.13.0"


@attrs.frozen
class Verified:
    """What one `plait verify` came to. found: its JSON, or None if nothing could be compared. seconds: of the whole
    command, start and imports among them. printed: all it printed."""

    found: dict[str, Any] | None
    seconds: float
    printed: str


def python(needs: tuple[str, ...]) -> Path:
    """The interpreter of an environment with these packages, beside those of this one."""
    at = FOLDER / needs[0].replace("==", "-")
    found, mark = at / "bin" / "python", at / "made-of"
    if not mark.exists():
        print(f"environment: {at}", file=sys.stderr, flush=True)
        venv.create(at, clear=True, with_pip=True)
        site = at / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (site / "here.pth").write_text(here, encoding="utf-8")
        subprocess.run([found, "-m", "pip", "install", "-q", TORCH, *needs], check=True)
        mark.write_text("\n".join(needs), encoding="utf-8")
    return found


def verified(needs: tuple[str, ...], target: str, cwd: Path, *options: str) -> Verified:
    """Run `plait verify TARGET` in `cwd`, in the environment of `needs`."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "found.json"
        command = [python(needs), "-W", "ignore", "-m", "plait", "verify", target, *options, "--json", written]
        started = time.monotonic()
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8")
        seconds = time.monotonic() - started
        found = json.loads(written.read_text(encoding="utf-8")) if written.exists() else None
    return Verified(found, seconds, done.stdout + done.stderr)
