"""The page's recipes agree on the real projects: transformers, Accelerate and Lightning Fabric."""

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
PAGE = ROOT / "docs" / "verify-any-code.md"
PROJECTS = ("accelerate", "lightning-fabric")
MODEL = """
from transformers import AutoModelForCausalLM, LlamaConfig
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained("my-model")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has what this one has, and the projects."""
    folder = tmp_path_factory.mktemp("projects")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "beside.pth"
    site.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (folder / "pins.txt").write_text(f"torch=={version('torch').partition('+')[0]}\n")
    command = [found, "-m", "pip", "install", "--quiet", "--constraint", folder / "pins.txt", *PROJECTS]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(PROJECTS)}: {done.stderr.strip().splitlines()[-1]}")
    return found


@pytest.mark.parametrize("target", ["check.py::tp", "recipes.py::accelerate", "recipes.py::fabric"])
def test_a_recipe_agrees(python: Path, target: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_files(PAGE, tmp_path)
    if target.startswith("check"):
        subprocess.run([python, "-c", MODEL], cwd=tmp_path, check=True, capture_output=True)
    command = [python, "-m", "plait", "verify", target, "--json", "found.json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["answers"]
    assert sum(answer["status"] == "ok" for answer in answers) >= 9, done.stdout
