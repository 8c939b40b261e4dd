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
PEER = ("torchtitan==0.2.2", "torchdata==0.11.0", "tyro==1.0.16", "docstring-parser==0.18.0", "typeguard==4.6.1")
HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-crt")  # 2.4 MB, for a torch whose Triton has those of an older CUDA
PLAIN = {"PIP_CONSTRAINT": "", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}


def torch_over_these_packages(here: Path, version: str) -> Path:
    """The packages of an environment in `here` that has this torch, such as "2.11", and all else from the environment
    of this Python. It is made if it does not exist."""
    packages = here / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    mark, command = here / f"torch-{version}", here / "bin/plait"
    if mark.exists():
        return packages
    print(f"{here}: torch {version} for CUDA, 0.8 GB to download", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(here)
    pip = [str(here / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
    environ = {**os.environ, **PLAIN}
    whole = version if version.count(".") > 1 else f"{version}.*"
    subprocess.run([*pip, f"torch=={whole}"], check=True, env=environ)
    subprocess.run([*pip, triton_of(packages)], check=True, env=environ)
    others = sysconfig.get_path("purelib")
    # As a line of code, because the files of editable packages there must be read too.
    (packages / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n", encoding="utf-8")
    command.write_text(
        f"#!{here}/bin/python\nimport sys\nfrom plait.commands.main import main\nsys.exit(main())\n", encoding="utf-8"
    )
    command.chmod(0o755)
    mark.touch()
    return packages


def triton_of(packages: Path) -> str:
    """The requirement of the torch in `packages`."""
    (torch,) = importlib.metadata.distributions(name="torch", path=[str(packages)])
    return next(match[0] for need in torch.requires or () if (match := re.match(r"triton[=~]=[\d.]+", need)))


def headers_for(packages: Path) -> Path:
    """The folder of CUDA's headers that fit the torch in `packages`: Triton's, or those of wheels for its release."""
    tritons, own = packages / "triton/backends/nvidia/include", packages.parents[2] / "cuda"
    release = release_of_torch(packages)
    if release_of_headers(tritons)[0] == release[0]:
        return tritons
    if not own.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
        wheels = [f"{name}=={release[0]}.{release[1]}.*" for name in HEADERS]
        subprocess.run([*pip, f"--target={own}", *wheels], check=True, env={**os.environ, **PLAIN})
    return next(own.rglob("cuda.h")).parent


def release_of_torch(packages: Path) -> tuple[int, int]:
    """The CUDA for which the torch in `packages` was built, such as (13, 0)."""
    text = (packages / "torch/version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*'(\d+)\.(\d+)'", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]), int(found[2])


def release_of_headers(folder: Path) -> tuple[int, int]:
    """The CUDA that the headers in `folder` describe."""
    text = (folder / "cuda.h").read_text(encoding="utf-8")
    found = re.search(r"^#define CUDA_VERSION (\d+)", text, re.MULTILINE)
    assert found is not None, folder
    return divmod(int(found[1]) // 10, 100)


def build(packages: Path, headers: Path, out: Path, devices: int) -> None:
    """Put the simulated device into `out`, with the names by which the torch in `packages` asks for NVIDIA's libraries.

    devices: how many a process sees that does not say otherwise. ValueError: `headers` are of another major release of
    CUDA than torch's, so structures such as the properties of a device have other fields.
    """
    has, needs = release_of_headers(headers), release_of_torch(packages)
    if has[0] != needs[0]:
        raise ValueError(
            f"{headers}/cuda.h is of CUDA {has[0]}.{has[1]}, but this torch was built for CUDA {needs[0]}.{needs[1]}; "
            f"headers of CUDA {needs[0]} fit"
        )
    where = {"TORCH": packages / "torch/lib", "CUDA": headers, "OUT": out}
    given = [f"{name}={path}" for name, path in where.items()]
    command = ["make", "--silent", "-C", str(ROOT / "tools/simulated_gpu/device"), *given, f"DEVICES={devices}"]
    subprocess.run(command, check=True)


def with_a_peer(packages: Path) -> None:
    """Put torchtitan beside it, for the table of the two; what it needs more is in the environment of this Python."""
    if not [*packages.glob("torchtitan-*")]:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
        subprocess.run([*pip, f"--target={packages}", *PEER], check=True, env={**os.environ, **PLAIN})


def main() -> None:
    version = importlib.metadata.version("torch").partition("+")[0]
    packages = torch_over_these_packages(PYTHON.parents[1], version)
    with_a_peer(packages)
    build(packages, headers_for(packages), DEVICE, devices=1)


if __name__ == "__main__":
    main()
