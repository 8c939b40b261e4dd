"""The simulated device is built with the headers of torch's CUDA."""

from pathlib import Path

import pytest

from tools.simulated_gpu.environment import build, headers_for, triton_of


def packages_with(here: Path, headers: int, torch: str = "13.0") -> Path:
    """Packages of an environment in which Triton brings the headers of this CUDA_VERSION."""
    packages = here / "lib/python3.11/site-packages"
    include = packages / "triton/backends/nvidia/include"
    for folder in (include, packages / "torch"):
        folder.mkdir(parents=True)
    (include / "cuda.h").write_text(f"/* */\n#define CUDA_VERSION {headers}\n")
    (packages / "torch/version.py").write_text(f"debug = False\ncuda: Optional[str] = '{torch}'\nhip = None\n")
    return packages


def test_headers_of_another_release_are_refused(tmp_path: Path) -> None:
    """Built with them it would fill in properties that torch reads at other places, and torch 2.11 would crash."""
    packages = packages_with(tmp_path, 12080)
    include = packages / "triton/backends/nvidia/include"
    said = r"cuda\.h is of CUDA 12\.8, but this torch was built for CUDA 13\.0; headers of CUDA 13 fit"
    with pytest.raises(ValueError, match=said):
        build(packages, include, tmp_path / "device", devices=1)
    assert not (tmp_path / "device").exists()


def test_triton_brings_the_headers_if_its_release_is_torchs(tmp_path: Path) -> None:
    packages = packages_with(tmp_path, 13010)
    assert headers_for(packages) == packages / "triton/backends/nvidia/include"
    older = packages_with(tmp_path / "older", 12080)
    own = tmp_path / "older/cuda/nvidia/include"
    own.mkdir(parents=True)
    (own / "cuda.h").touch()
    assert headers_for(older) == own


@pytest.mark.parametrize("need", ["triton==3.6.0", "triton~=3.9.0"])  # of torch 2.11, and of 2.15
def test_triton_is_the_one_that_torch_requires(need: str, tmp_path: Path) -> None:
    (told := tmp_path / "torch-2.15.0.dist-info").mkdir()
    requires = f"Requires-Dist: sympy>=1.13\nRequires-Dist: {need}; platform_system == 'Linux'\n"
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: 2.15.0\n{requires}")
    assert triton_of(tmp_path) == need
