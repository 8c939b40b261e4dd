"""The simulated device counts what it is asked for, and steps of Plait on it do not wait.

Needs the environment of `make gpu-host`; none of it belongs to the default install.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.simulated_gpu.counter import LIBRARY, PYTHON, ROOT, variables

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no simulated GPU: make gpu-host")

FORM = """
import json, sys, tempfile, pathlib
from tools.simulated_gpu.counter import Counter
import torch
counter = Counter(pathlib.Path(tempfile.mkdtemp()))
a = torch.ones(64, 64, device="cuda")
counter.start()
{body}
counts = counter.stop()
told = {{f"{{kind}}: {{name}}": given for (kind, name), given in counts.kinds.items()}}
print(json.dumps([told, [[wait.what, *wait.where] for wait in counts.waits]]))
"""


def ran(body: str, **more: str) -> tuple[dict[str, Any], list[list[str]]]:
    """(what was counted while the lines ran; each wait and its lines)."""
    environ = {"PATH": "/usr/bin:/bin", **variables(), **more}
    command = [str(PYTHON), "-c", FORM.format(body=body)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts, waits = json.loads(done.stdout.splitlines()[-1])
    return counts, waits


def counted(tmp_path: Path, *options: str) -> dict[str, Any]:
    """What a step of `plait train` asks for."""
    file = tmp_path / "counts.json"
    trained(f"--json={file}", *options)
    return json.loads(file.read_text())


def trained(*options: str, **more: str) -> str:
    """What the steps that are counted write to standard error. more: of the environment."""
    command = [str(PYTHON), "-m", "tools.simulated_gpu.count", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_kernels_products_copies_and_waits_are_counted() -> None:
    body = """
b = a @ a
b += 1
c = torch.arange(8.0).to("cuda")
d = torch.arange(8.0).pin_memory().to("cuda", non_blocking=True)
numbers = c.tolist(), d.cpu()
assert numbers[0] == numbers[1].tolist() == list(range(8))
"""
    counts, waits = ran(body)
    assert counts["product: cublasSgemm_v2"] == [1, 0]
    assert counts["copy: host to device, pageable"] == [1, 32]
    assert counts["copy: host to device"] == [1, 32]
    assert counts["copy: device to host, pageable"] == [2, 64]
    assert sum(calls for name, (calls, _) in counts.items() if name.startswith("kernel: ") and "add" in name) == 1
    assert {what for what, *_ in waits} == {"copy device to host, pageable", "cudaStreamSynchronize"}
    assert any(re.search(r"<string>:\d+ <module>", line) for _, *lines in waits for line in lines)


def test_the_allocator_is_torchs_and_the_device_ends() -> None:
    body = """
before = torch.cuda.memory_allocated()
x = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
assert torch.cuda.memory_allocated() - before == 2**29
try:
    torch.empty(2**30, dtype=torch.float32, device="cuda")
    raise SystemExit("4 GiB fit into 2")
except torch.OutOfMemoryError as error:
    assert "2.00 GiB" in str(error), error
"""
    counts, _ = ran(body, SIMULATED_GPU_GIB="2", PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert sum(size for name, (_, size) in counts.items() if name == "call: cuMemCreate") >= 2**29


def test_a_kernel_compiled_by_nvrtc_runs_under_the_profiler() -> None:
    """torchtitan draws weights by such a kernel; the profile of `make gpu` asks CUPTI."""
    body = """
with torch.profiler.profile() as seen:
    a.erfinv_()
assert torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()
assert [event.key for event in seen.key_averages()] == ["aten::erfinv_"]
"""
    counts, _ = ran(body)
    assert counts["triton: erfinv_kernel_vectorized4_kernel"] == [1, 0]


def test_what_is_not_simulated_says_its_name() -> None:
    environ = {"PATH": "/usr/bin:/bin", **variables()}
    code = "import torch; torch.fft.fft(torch.ones(8, device='cuda'))"
    done = subprocess.run([str(PYTHON), "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search(r"simulated GPU: cufft\w+ is not simulated", done.stderr)


SMALL = ("model=llama3_debug", "precision.param=bfloat16", "train.seq_len=256")
MIXTURE = ("model=deepseek_v3_debug", *SMALL[1:])
LAYOUTS: dict[str, tuple[str, ...]] = {
    "alone": ("strategy=[]", *SMALL),
    "fsdp2": ("--world=8", "strategy=[fsdp2]", *SMALL),
    "HSDP": ("--world=8", "strategy=[fsdp2]", "strategy.fsdp2.replicate=2", *SMALL),
    "tensor": ("--world=8", "strategy=[tensor_parallel,fsdp2]", "strategy.tensor_parallel.degree=2", *SMALL),
    "context": ("--world=8", "strategy=[context_parallel,fsdp2]", "strategy.context_parallel.degree=2", *SMALL),
    "expert": ("--world=8", "strategy=[expert_parallel,fsdp2]", "strategy.expert_parallel.degree=2", *MIXTURE),
    "simplefsdp": ("--world=8", "strategy=[simplefsdp]", *SMALL),
    "lora": ("strategy=[lora,fsdp2]", *SMALL),
}
QUICK = ("fsdp2",)
NEEDED = {"expert": "plait_expert_parallel/"}  # rows per expert decide shapes on the host


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_no_step_waits_but_for_the_row_of_the_step_before(name: str, tmp_path: Path) -> None:
    told = counted(tmp_path, *LAYOUTS[name])
    others = [wait for wait in told["waits"] if f"| {NEEDED.get(name, '-')}" not in wait]
    assert others == []
    assert sum(told["marked waits"].values()) == 2  # its values, and the event at its end
    assert told["kernels"] > 100
    assert not any("pageable" in copy for copy in told["by name"] if name not in NEEDED)


def test_a_wait_in_a_step_is_told_with_its_line(tmp_path: Path) -> None:
    """A planted one: otherwise a count of 0 would prove nothing."""
    planted = "from plait.train import trainer; import torch\\nplain = trainer.Trainer.train_step"
    code = f'''
import sys
exec("{planted}")
def train_step(self):
    torch.ones(1, device="cuda").item()
    return plain(self)
trainer.Trainer.train_step = train_step
from tools.simulated_gpu.count import main
main()
'''
    file = tmp_path / "counts.json"
    command = [str(PYTHON), "-c", code, f"--json={file}", *LAYOUTS["alone"]]
    environ = {"PATH": "/usr/bin:/bin", **variables()}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    waits = json.loads(file.read_text())["waits"]
    assert list(waits.values()) == [1.0]
    assert " | plait/train/trainer.py:" in next(iter(waits))


FUSED = {  # part of the names of inductor's kernels -> how many launches a block and step has of them
    "_fused_rms_norm": 7,  # two forward, two backward, and three that sum over tokens for the weights
    "_mul_silu_": 2,  # SwiGLU and its gradient
    "_mul_stack_sub": 2,  # rotated queries and keys
    "_neg_select_stack": 2,  # and their gradients
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["90", "100"])
def test_a_compiled_block_is_fused_for_each_generation_of_gpus(
    capability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a third block adds to two. Triton and ptxas compile for that GPU; attention runs once in each direction."""
    monkeypatch.setenv("SIMULATED_GPU_CAPABILITY", capability)
    given = ("strategy=[]", *SMALL, "compile.enabled=true")
    two, three = (counted(tmp_path, *given, f"model.n_layers={n}")["launches"] for n in (2, 3))
    more = {name: round(three[name] - two.get(name, 0)) for name in three}
    compiled = {name: n for name, n in more.items() if name.startswith("triton_")}
    assert more["cuDNN graph"] == 2
    assert more["cublasGemmEx"] == 3 * 7
    for part, times in FUSED.items():
        assert sum(n for name, n in compiled.items() if part in name) == times, (part, compiled)
    casts = sum(n for name, n in compiled.items() if re.fullmatch(r"triton_poi_fused__to_copy(_t)?_\d+", name))
    assert sum(compiled.values()) - casts <= 14
    assert sum(n for name, n in more.items() if name not in compiled) == 2 + 3 * 7


def least(tokens: int, dim: int, kv: int, ffn: int) -> tuple[int, int]:
    """Bytes that a block moves forward and backward, in bfloat16 over weights in float32, if every product, attention,
    and kernel between them reads each tensor once and writes its results once.

    kv, ffn: widths of the keys and of the feed-forward.
    """
    x, k, f = (2 * tokens * width for width in (dim, kv, ffn))
    weights = 2 * dim * (2 * dim + 2 * kv + 3 * ffn)
    casts = 3 * weights  # between float32 and bfloat16: of the weights, and of their gradients
    parts = {  # of x, k and f: forward, backward
        "norms, with the sums of branches": ((9, 0, 0), (18, 0, 0)),  # backward once more for their weights
        "queries, keys, values, output": ((6, 2, 0), (12, 4, 0)),
        "RoPE": ((2, 2, 0), (2, 2, 0)),
        "attention": ((2, 2, 0), (4, 4, 0)),
        "w1, w2, w3": ((3, 0, 3), (6, 0, 6)),
        "SwiGLU": ((0, 0, 3), (0, 0, 5)),
    }
    forward, backward = (
        sum(n * size for part in parts.values() for n, size in zip(part[way], (x, k, f), strict=True)) for way in (0, 1)
    )
    return forward + casts + weights, backward + casts + 2 * weights


@pytest.mark.slow
def test_a_compiled_block_moves_each_tensor_once() -> None:
    """Within 3%, by inductor's own count of bytes."""
    given = ["strategy=[]", "model=llama3_1b", "model.n_layers=2", "train.local_batch_size=4", "train.seq_len=4096"]
    more = {"TORCH_LOGS": "inductor_metrics", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    told = trained(*given, "precision.param=bfloat16", "compile.enabled=true", **more)
    forward, *_, backward = map(
        int, re.findall(r"'num_bytes_accessed': (\d+)", told)
    )  # between them, those of the loss
    floor = least(4 * 4096, 2048, 512, 8192)
    assert [forward / floor[0], backward / floor[1]] == pytest.approx([1, 1], abs=0.03)
