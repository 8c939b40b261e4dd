"""The pool's ranks are forks that can use a GPU, whatever was imported before the fork."""

import os
import subprocess
import sys

import pytest
import torch

from plait.parallel.allocator import nvml_loads
from plait_testing.pool import COUNTED_BY_NVML, OF_SUITES

ASKED = """
import importlib, sys, torch
def asked(): raise SystemExit("the CUDA runtime is asked for its GPUs: " + name)
torch._C._cuda_getDeviceCount = asked
for name in sys.argv[1:]: importlib.import_module(name)
"""


def test_ranks_count_gpus_without_the_cuda_runtime(plait_ranks):
    assert plait_ranks.run(os.environ.get, COUNTED_BY_NVML, world=1) == ["1"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no kernel tells of threads")
def test_ranks_are_forks_of_one_thread(plait_ranks):
    (parent,) = plait_ranks.run(os.getppid, world=1)
    assert parent != os.getpid()
    assert len(os.listdir(f"/proc/{parent}/task")) == 1


@pytest.mark.slow  # needs the wheel for CUDA
@pytest.mark.skipif(not hasattr(torch._C, "_cuda_getDeviceCount"), reason="this torch is built without CUDA")
@pytest.mark.skipif(not nvml_loads(), reason="without NVML torch can only ask the CUDA runtime")
def test_no_preload_asks_the_cuda_runtime():
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *OF_SUITES],
        env=os.environ | {COUNTED_BY_NVML: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
