"""What `make gpu` needs on a machine with a GPU and without a network: wheels, made elsewhere, and an environment.

    python benchmarks/gpu_setup.py wheels [--python 3.12]   with a network: into .gpu-wheels
    python benchmarks/gpu_setup.py environment              without, and with the Python that has torch: into .gpu/venv

The environment sees that Python's packages, torch among them, which is neither downloaded nor replaced. Needs nothing
but Python.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS, ENVIRONMENT = ROOT / ".gpu-wheels", ROOT / ".gpu" / "venv"
PACKAGES = [file.parent for file in (ROOT / "core/pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))]

PEER = ("torchtitan==0.2.2", "torchdata==0.11.0", "tyro==1.0.16")
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "cloudpickle")
INSTALLERS = ("pip", "setuptools")  # used to install, and not installed
SOURCES = ("antlr4-python3-runtime",)  # pure Python without a wheel on the index
LEFT_OUT = {  # what no test or benchmark on a GPU imports; together they are larger than all others
    "torch": "the machine's own",
    "pyarrow": "for data in Parquet files",
    "scipy": "for the search of plait-autoparallel",
    "grpcio": "for the server of TensorBoard",
    "tensorboard-data-server": "for the server of TensorBoard",
    "datasets": "for torchtitan's own data",
    "pillow": "for torchtitan's models of images",
    "huggingface_hub": "for downloads",
    "ray": "for runs on Ray's nodes",
}
PLATFORMS = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
MARK = "elsewhere"  # the local version of what stands in for a distribution that is left out


def requirements() -> list[str]:
    """What Plait, its plugins and their tests on a GPU need, and torchtitan."""
    found = [*TESTS, *PEER, *INSTALLERS]
    for folder in (ROOT, *PACKAGES):
        needs = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
        found += [need for need in needs if not re.match(r"plait\b", need)]
    return found


def pins() -> dict[str, str]:
    """Distribution -> its version in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def stand_in(name: str, version: str, folder: Path) -> None:
    """A wheel without content that has no dependencies: pip takes it for `name`."""
    plain, whole = name.replace("-", "_"), f"{version}+{MARK}"
    info = f"{plain}-{whole}.dist-info"
    with zipfile.ZipFile(folder / f"{plain}-{whole}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {whole}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def wheels(python: str, to: Path) -> None:
    """Download what the machine lacks. python: its version, such as 3.12."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    known = pins()
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in LEFT_OUT:
            stand_in(name, known[name], Path(scratch))
        sources = [f"{name}=={known[name]}" for name in SOURCES]
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", scratch, *sources], check=True)
        platforms = [f"--platform=manylinux_{each}_x86_64" for each in PLATFORMS]
        old = ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]  # names of 2_17 and 2_5
        for_it = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms, *old]
        constraints = ["--constraint", str(ROOT / "constraints.txt"), "--find-links", scratch]
        subprocess.run([*pip, "download", *for_it, *constraints, "--dest", str(to), *requirements()], check=True)
    for file in to.glob(f"*+{MARK}-*.whl"):
        file.unlink()
    files = list(to.glob("*.whl"))
    size = sum(file.stat().st_size for file in files) / 2**20
    print(f"{to}: {len(files)} wheels for Python {python} on x86-64, {size:.1f} MiB; take it along with this tree")
    print("left out: " + "; ".join(f"{name} ({why})" for name, why in LEFT_OUT.items()))


def environment(wheels: Path, at: Path) -> None:
    """An environment with the carried wheels, Plait and its plugins as they are in this tree, over this Python."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit(f"make gpu: {sys.executable} has no torch; name a Python that has it: make gpu TORCH_PYTHON=...")
    files = sorted(wheels.glob("*.whl"))
    if not files:
        sys.exit(f"make gpu: there are no wheels in {wheels}; run `make gpu-wheels` where there is a network")
    manifests = [folder / "pyproject.toml" for folder in (ROOT, *PACKAGES)]
    asked = [sys.executable, *(file.name for file in files), *(file.read_text(encoding="utf-8") for file in manifests)]
    digest, mark = hashlib.sha256(repr(asked).encode()).hexdigest(), at / "made-of"
    if mark.exists() and mark.read_text(encoding="utf-8") == digest:
        return
    print(f"environment: {at}, over {sys.executable}", flush=True)
    venv.EnvBuilder(system_site_packages=True, clear=True, symlinks=os.name != "nt").create(at)
    python = str(at / "bin" / "python")
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout.strip())
    theirs = {str(Path(torch.origin).parents[1]), *(p for p in sys.path if p.endswith("-packages"))}
    (own / "machine.pth").write_text(
        "".join(f"{path}\n" for path in sorted(theirs)), encoding="utf-8"
    )  # that Python may be a venv too
    tools = {name: next(file for file in files if file.name.startswith(f"{name}-")) for name in INSTALLERS}
    carried = [str(file) for file in files if file not in tools.values()]
    pip = [
        python,
        f"{tools['pip']}/pip",
        "--disable-pip-version-check",
        "--quiet",
        "install",
        "--no-index",
        "--no-deps",
    ]
    done = subprocess.run([*pip, "--ignore-installed", *carried])
    if done.returncode:
        sys.exit(
            f"make gpu: {wheels} has no wheels for Python {sys.version_info[0]}.{sys.version_info[1]}: "
            f"make gpu-wheels GPU_PYTHON={sys.version_info[0]}.{sys.version_info[1]}"
        )
    ours = [part for folder in (ROOT, *PACKAGES) for part in ("--editable", str(folder))]
    with tempfile.TemporaryDirectory() as scratch:  # one setuptools for all: an environment for each took a minute
        subprocess.run([*pip, "--target", scratch, str(tools["setuptools"])], check=True)
        paths = os.pathsep.join(filter(None, (scratch, os.environ.get("PYTHONPATH"))))
        subprocess.run([*pip, "--no-build-isolation", *ours], check=True, env={**os.environ, "PYTHONPATH": paths})
    mark.write_text(digest, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("wheels", "environment"))
    parser.add_argument("--python", default="3.12", help="version of the Python on the machine with a GPU")
    parser.add_argument("--wheels", type=Path, default=WHEELS)
    parser.add_argument("--at", type=Path, default=ENVIRONMENT, help="where the environment goes")
    asked = parser.parse_args()
    if asked.what == "wheels":
        wheels(asked.python, asked.wheels.resolve())
    else:
        environment(asked.wheels.resolve(), asked.at.resolve())


if __name__ == "__main__":
    main()
