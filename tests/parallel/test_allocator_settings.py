"""The allocator of a GPU grows its segments, unless the user configures it or torch cannot; tests/gpu sees it do so."""

import ctypes
import os

import pytest
import torch

from plait.parallel.allocator import grow_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GPU = torch.device("cuda", 0)
ON, OFF = "expandable_segments:True", "expandable_segments:False"


class Gpu:
    """What torch and the loader would do on a machine with a GPU.

    errors: raised by its allocations, in order; then they succeed. libraries: those that load. seen: what happened.
    """

    def __init__(self):
        self.errors, self.libraries, self.seen = [], {"libnvidia-ml.so.1"}, []

    def empty(self, size, device):
        self.seen.append(("allocation", device, os.environ.get(NAMES[0])))
        if self.errors:
            raise self.errors.pop(0)

    def load(self, name):
        if name not in self.libraries:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    def set(self, text):
        self.seen.append(("setting", text))


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in NAMES})
    monkeypatch.setattr(torch, "empty", gpu.empty)
    monkeypatch.setattr(ctypes, "CDLL", gpu.load)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", gpu.set)
    return gpu


def test_it_grows_unless_it_is_configured(gpu):
    grow_segments(GPU)
    assert gpu.seen == [("allocation", GPU, ON)]
    assert os.environ[NAMES[0]] == ON


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_says_holds(gpu, name):
    os.environ[name] = "max_split_size_mb:64"
    grow_segments(GPU)
    assert {n: os.environ.get(n) for n in NAMES} == {n: os.environ[name] if n == name else None for n in NAMES}
    assert gpu.seen == []


def test_segments_do_not_grow_without_nvml(gpu):
    """torch 2.13 calls it without a look whether it is there: a crash that no handler sees."""
    gpu.libraries.clear()
    grow_segments(GPU)
    assert NAMES[0] not in os.environ
    assert gpu.seen == []


def test_segments_do_not_grow_if_the_first_allocation_fails(gpu):
    gpu.errors = [RuntimeError("Expected NVML_SUCCESS == nvmlDeviceGetGpuFabricInfoV_ to be true")]
    grow_segments(GPU)
    assert gpu.seen == [("allocation", GPU, ON), ("setting", OFF), ("allocation", GPU, OFF)]
    assert os.environ[NAMES[0]] == OFF


def test_other_errors_are_not_hidden(gpu):
    gpu.errors = [RuntimeError("first"), RuntimeError("no kernel image is available")]
    with pytest.raises(RuntimeError, match="no kernel image"):
        grow_segments(GPU)
    gpu.errors = [torch.OutOfMemoryError("another process has it all")]
    del os.environ[NAMES[0]]
    with pytest.raises(torch.OutOfMemoryError):
        grow_segments(GPU)
    assert os.environ[NAMES[0]] == ON
