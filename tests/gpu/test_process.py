"""What a process of its own does with a GPU: the command, its groups, its allocator, and memory that runs out."""

import subprocess
import sys

import pytest

from tests.helpers.commands import environment, rows, train

GROUPS = """
import sys, torch, torch.distributed as dist
from plait.parallel.process_group import end_group, start_group
start_group(sys.argv[1])
kinds = dict.fromkeys(["cpu", sys.argv[1]])
sums = [torch.full((3,), 2.0, device=kind) for kind in kinds]
for each in [dist.all_reduce(each, async_op=True) for each in sums]:
    each.wait()
answers = [None]
dist.all_gather_object(answers, {"rank": dist.get_rank()})
backends = [dist.group.WORLD._get_backend(torch.device(kind)).name() for kind in kinds]
print([each.tolist() for each in sums], answers, *backends)
end_group()
"""
TRAINS = ("strategy=[fsdp2]", "launch.nproc_per_node=1", "train.steps=6", "run.name=a", "precision.param=bfloat16")
TOO_MUCH = (
    *("strategy=[]", "model.dim=1024", "train.local_batch_size=400000"),
    *("run.name=a", "launch.nproc_per_node=1"),
)
SEGMENTS = """
import torch
from plait.parallel.process_group import start_group
start_group("cuda")
x = torch.empty(64 * 2**20, device="cuda")
print(any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""


def printed(program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_group_for_both_kinds_of_tensors(device):
    said = printed(GROUPS, device)
    two = [[2.0] * 3] * (2 if device == "cuda" else 1)
    assert said == f"{two} [{{'rank': 0}}] gloo{' nccl' if device == 'cuda' else ''}"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_the_allocator_grows_its_segments(device):
    assert printed(SEGMENTS) == "True"


def test_the_command_trains_on_the_device(device, tmp_path):
    done = train(*TRAINS, f"launch.device={device}", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    found = rows(tmp_path / "runs" / "a")
    kind = "cuda_allocator_peak" if device == "cuda" else "resident_peak"
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert {row["memory_kind"] for row in found} == {kind}
    assert (tmp_path / "runs" / "a" / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_memory_that_runs_out_is_one_sentence_and_an_exit_code(device, tmp_path):
    done = train(*TOO_MUCH, "launch.device=cuda", cwd=tmp_path)
    assert done.code == 4, done.out + done.err
    assert "train.local_batch_size" in done.err
