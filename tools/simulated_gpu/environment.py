"""Makes .gpu-host: torch's CUDA build over the packages of .venv, and the simulated device. Needs a network, gcc, nm.

    .venv/bin/python -m tools.simulated_gpu.environment

Of NVIDIA's packages it takes none: the simulated device stands in for their libraries. Triton brings CUDA's headers.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tools.simulated_gpu.counter import DEVICE, PYTHON, ROOT

# A machine's own settings of pip may name builds for the CPU alone; those of the index are for CUDA.
PLAIN = {"PIP_CONSTRAINT": "", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}


def install(*packages: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps", *packages]
    subprocess.run(command, check=True, env={**os.environ, **PLAIN})


def triton_of(packages: Path) -> str:
    """The requirement of the torch in `packages`."""
    (torch,) = importlib.metadata.distributions(name="torch", path=[str(packages)])
    return next(match[0] for need in torch.requires or () if (match := re.match(r"triton==[\d.]+", need)))


def main() -> None:
    here = PYTHON.parents[1]
    packages = here / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    version = importlib.metadata.version("torch").partition("+")[0]
    mark = here / f"torch-{version}"
    if not mark.exists():
        print(f"{here}: torch {version} for CUDA, 0.8 GB to download", flush=True)
        venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(here)
        install(f"torch=={version}")
        install(triton_of(packages))
        others = sysconfig.get_path("purelib")
        # As a line of code, because the files of editable packages there must be read too.
        (packages / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n", encoding="utf-8")
        mark.touch()
    where = {"TORCH": packages / "torch/lib", "CUDA": packages / "triton/backends/nvidia/include", "OUT": DEVICE}
    command = ["make", "--silent", "-C", str(ROOT / "tools/simulated_gpu/device")]
    subprocess.run([*command, *(f"{name}={path}" for name, path in where.items())], check=True)


if __name__ == "__main__":
    main()
