"""Parts of `make gpu` that are a process of their own, without a training: tests, scripts, `plait calibrate`."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_results import Record
from throughput import OUT_OF_MEMORY

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TESTS = (
    *("-m", "pytest", "-m", "gpu", "-rfE", "-p", "no:cacheprovider", "tests/gpu"),
    *("-p", "plait_testing.plugin", "-p", "xdist.plugin", "-p", "pytest_timeout"),
)


def process(arguments: list[str], seconds: float, log: Path, cwd: Path = ROOT, **env: str) -> str:
    """Run Python with these arguments; returns "", or why it failed."""
    with open(log, "w", encoding="utf-8") as file:
        try:
            command, env = [sys.executable, *arguments], {**os.environ, **env}
            code = subprocess.run(command, cwd=cwd, stdout=file, stderr=file, env=env, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:.0f} s"
    if not code:
        return ""
    said = log.read_text(errors="replace", encoding="utf-8")
    if OUT_OF_MEMORY.search(said):
        return "out of memory"
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line) for line in said.splitlines() if line.strip()]
    lines = [line for line in lines if not re.match(r"\[[WE]\d{4}", line)]  # what torch logs while it ends
    told = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)] or lines  # the last may be a ruler
    return told[-1] if told else f"exit code {code}"


def tests(seconds: float, log: Path) -> Record:
    why = process(list(TESTS), seconds, log, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    said = log.read_text(errors="replace", encoding="utf-8")
    wrong = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if why:
        return {"failed": f"{why}: {', '.join(wrong)}" if wrong else why}
    return {"said": said.strip().splitlines()[-1]}


def script(arguments: list[str], seconds: float, log: Path) -> Record:
    """Another benchmark, which prints tables."""
    why = process(["-W", "ignore", str(HERE / arguments[0]), *arguments[1:]], seconds, log)
    return {"failed": why} if why else {"said": log.read_text(errors="replace", encoding="utf-8").strip()}


def ring_attention(device: str, seconds: float, log: Path) -> Record:
    """Whether it uses torch's fused kernel here."""
    code = f"from plait_context_parallel.fused import trouble; print(trouble({device!r}) or 'the fused kernel is used')"
    why = process(["-c", code], seconds, log)
    return {"failed": why} if why else {"said": log.read_text(encoding="utf-8").strip().splitlines()[-1]}


def calibrate(device: str, seconds: float, log: Path) -> Record:
    """The figures that `plait calibrate` finds."""
    with tempfile.TemporaryDirectory(prefix="plait-calibrate-") as scratch:
        command = ["-m", "plait", "calibrate", "name=gpu", "ranks=1", f"device={device}"]
        why = process(command, seconds, log, Path(scratch))
        found = Path(scratch, "conf/cluster/gpu.yaml")
        return {"failed": why} if why else {"said": f"```yaml\n{found.read_text(encoding='utf-8')}```"}
