"""Runs tests with another torch than that of .venv, such as the oldest that is supported.

    make test-torch TORCH=2.11 [TESTS="tests/contract"]

The environment is .torch-2.11, over the packages of .venv. Its torch is the index's build for CUDA without NVIDIA's
packages, in place of whose libraries the simulated device stands, here with no device: tests see a CPU alone.
"""

import os
import subprocess
import sys
from pathlib import Path

from tools.simulated_gpu.environment import build, headers_for, torch_over_these_packages

ROOT = Path(__file__).resolve().parents[1]


def main(version: str, tests: list[str]) -> int:
    here = ROOT / f".torch-{version}"
    packages = torch_over_these_packages(here, version)
    build(packages, headers_for(packages), packages / "torch/lib", devices=0)
    python = str(here / "bin/python")
    subprocess.run([python, "-c", "import torch; print('torch', torch.__version__, flush=True)"], check=True)
    command = [python, "-m", "pytest", "-n", "2", "--dist", "loadgroup", *(tests or ["tests", "plugins"])]
    path = os.pathsep.join((str(here / "bin"), os.environ["PATH"]))
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
