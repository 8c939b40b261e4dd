"""Rehearses `make gpu` on the simulated device: every part runs as on a GPU, and its figures mean nothing.

    .gpu-host/bin/python -m tools.simulated_gpu.rehearse [--only PART ...] [--minutes 60]

Arguments are those of benchmarks/gpu.py. Results go to .gpu/rehearsed. It shows that parts start, end and are recorded.
"""

import os
import sys

from tools.simulated_gpu.counter import ROOT, variables

GIB = 139  # of an H200, so that no part is left out


def main() -> None:
    paths = (str(ROOT / "tools/simulated_gpu/everywhere"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SIMULATED_GPU_GIB": str(GIB)}
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), f"--results={ROOT}/.gpu/rehearsed", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **variables(), **more})


if __name__ == "__main__":
    main()
