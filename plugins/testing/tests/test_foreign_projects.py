"""The page's recipes agree on the real projects, as pip installs them."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, write_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PAGES = [ROOT / "docs" / "verify-any-code.md", ROOT / "docs" / "verify-recipes.md"]
MODEL = """
from transformers import AutoModelForCausalLM, LlamaConfig
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained("my-model")
"""
PROJECTS = {  # what pip installs -> recipe -> how many questions are answered at least
    ("accelerate", "lightning-fabric"): {"check.py::tp": 9, "recipes.py::accelerate": 10, "recipes.py::fabric": 10},
    ("torchtitan==0.2.2", "triton"): {"titan.py::fsdp": 10, "titan.py::fsdp_tp": 10},
    ("megatron-core==0.16.1",): {"megatron_tp.py::tp": 8},
    ("deepspeed==0.19.8",): {"deepspeed_zero.py::zero2": 9, "deepspeed_zero.py::zero3": 9},
}


@pytest.fixture(scope="module")
def python(request, tmp_path_factory):
    """An interpreter that has what this one has, and the projects."""
    folder = tmp_path_factory.mktemp("projects")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "beside.pth"
    site.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (folder / "pins.txt").write_text(f"torch=={version('torch').partition('+')[0]}\n")
    command = [found, "-m", "pip", "install", "--quiet", "--constraint", folder / "pins.txt", *request.param]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(request.param)}: {done.stderr.strip().splitlines()[-1]}")
    return found


CASES = [(names, target, count) for names, each in PROJECTS.items() for target, count in each.items()]


@pytest.mark.parametrize(
    ("python", "target", "count"), CASES, indirect=["python"], ids=[target for _, target, _ in CASES]
)
def test_a_recipe_agrees(python: Path, target: str, count: int, tmp_path: Path) -> None:
    if target.startswith("check"):
        pytest.importorskip("transformers")
        subprocess.run([python, "-c", MODEL], cwd=tmp_path, check=True, capture_output=True)
    for page in PAGES:
        write_files(page, tmp_path)
    command = [python, "-W", "ignore", "-m", "plait", "verify", target, "--json", "found.json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["answers"]
    assert sum(answer["status"] == "ok" for answer in answers) >= count, done.stdout
