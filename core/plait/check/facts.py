"""What must be the same on all machines of a run, because it determines the numbers, as name -> text.

Cheap: sources are read, data and weights are not. A few pieces of a weight file stand for it.
"""

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from plait.contract.config import Config
from plait.contract.kinds import KINDS
from plait.strategies.registry import distributions, installed

Facts = dict[tuple[str, str], str | None]  # (kind, name) -> what it is here; None: there is none

OWN = ("mode", "nproc_per_node", "rdzv_endpoint", "rendezvous_seconds")  # of launch: a machine may have its own
CORE = "plait-core"  # the distribution of this package
COMPUTING = ("torch", "triton", "numpy")  # what Plait computes with
VARIABLES = (  # with which libraries compute in another precision, or add in another order
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
    *("MKL_CBWR", "ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE", "FLASH_ATTENTION"),
    *("PYTORCH_JIT", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"),
)
PLACES = ("model", "strategy", "optimizer", "checkpoint")  # parts of the config that name files to read
OUTPUT = "checkpoint.dir"
MOST = 1000  # files of a folder
HEAD, PIECE, PIECES = 1 << 16, 1 << 12, 16  # bytes of a file's beginning, of a piece, and how many pieces


def of_command(config: Config) -> Facts:
    """The config as asked for, less what each machine has of its own."""
    leaves = _leaves(config.plain())
    return {("config", key): repr(value) for key, value in leaves if key not in {f"launch.{name}" for name in OWN}}


def of_machine(config: Config) -> Facts:
    """Versions, source code, environment, data, and the files that the config names. Raises PlaitError for data that
    cannot be read."""
    from plait.compose.build import build_model
    from plait.compose.targets import build_source
    from plait.parallel.process_group import device_of

    code = code_of(config)
    facts: Facts = {("version", "python"): sys.version.split()[0]}
    facts |= {("version", name): _version(name) for name in _distributions(code)}
    facts["device", "launch.device"] = device_of(config.launch.device)
    facts |= {("variable", name): os.environ.get(name) for name in VARIABLES}
    plugins = {*distributions()} - {"plait"}
    for name in code:
        facts |= {("code", file): digest for file, digest in _sources(name, plugins)}
    plain = config.plain()
    for key, value in _leaves({name: plain[name] for name in PLACES}):
        if isinstance(value, str) and key != OUTPUT and _may_be_a_path(key, value):
            facts |= {("files", f"{key}={file}"): digest for file, digest in _files(Path(value))}
    data = dict(config.data)
    if asked := [key for key in ("tokenizer", "images") if data.get(key) == "auto"]:
        model = build_model(config.model)[0]
        data |= {key: getattr(model, f"{key}_from", None) or "auto" for key in asked}
    facts["data", "data"] = build_source(data).fingerprint()
    return facts


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def code_of(config: Config) -> list[str]:
    """Top-level names of the modules whose code this run uses, less torch's and Python's, whose versions suffice."""
    targets = [part.get("_target_", "") for part in (config.model, config.data, config.optimizer)]
    names = {"plait", *(str(target).partition(".")[0] for target in targets)}
    for kind in KINDS.values():
        if kind.node:
            chosen, _, field = kind.node.partition(".")
            part = getattr(config, chosen)
            plugins = installed(kind.name)
            names |= {plugins[name].package for name in (getattr(part, field) if field else part) if name in plugins}
    return sorted(names - {"", "torch"} - sys.stdlib_module_names)


def _distributions(code: Iterable[str]) -> list[str]:
    """What is installed for `code`, and what that asks for; of what Plait asks for, only what computes."""
    by_package = distributions() | {"plait": CORE}
    names = (by_package.get(package, package) for package in code)
    own = {name for name in names if _version(name) is not None}
    return sorted(own | {*COMPUTING} | {need for name in own - {CORE} for need in _needs(name)})


def _needs(distribution: str) -> Iterator[str]:
    for line in requires(distribution) or ():
        need, _, marker = line.partition(";")
        if "extra" not in marker and (name := re.match(r"[\w.-]+", need)):
            yield name[0]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _sources(name: str, plugins: set[str]) -> Iterator[tuple[str, str]]:
    """(file, digest) of a package's source, or of a single module's; of the packages among `plugins` that it imports;
    and of the modules that a single one imports from beside it."""
    todo, seen = [name], set[str]()
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(Path(folder).rglob("*.py")):
                code = file.read_bytes()
                yield f"{name}/{file.relative_to(folder)}", _digest(code)
                if name != "plait":  # which imports no plugin
                    todo += plugins & _imported(code)
        if spec and spec.origin and not spec.submodule_search_locations and Path(spec.origin).suffix == ".py":
            code = Path(spec.origin).read_bytes()
            yield f"{name}.py", _digest(code)
            imported = _imported(code)
            todo += plugins & imported
            todo += [each for each in imported if _beside(each, Path(spec.origin).parent)]


def _imported(code: bytes) -> set[str]:
    """Top-level names of the modules that it imports."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return set()
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in plain + parts}


def _beside(name: str, folder: Path) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def _may_be_a_path(key: str, value: str) -> bool:
    named = key in ("checkpoint.init_from", "checkpoint.load")
    return (named or os.sep in value or bool(Path(value).suffix)) and os.path.exists(value)


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """(file, digest) of a file, or of the files of a folder without hidden ones."""
    if path.is_file():
        yield str(path), _sampled(path)
        return
    inside = (each for each in sorted(path.rglob("*")) if each.is_file())
    shown = (each for each in inside if not any(part.startswith(".") for part in each.relative_to(path).parts))
    for file in islice(shown, MOST):
        yield f"{path}/{file.relative_to(path)}", _sampled(file)


def _sampled(file: Path) -> str:
    """Of its size, its beginning and pieces from all over it: other weights differ nearly everywhere."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        pieces = [opened.read(HEAD)]
        for number in range(1, PIECES + 1) if size > HEAD else ():
            opened.seek(max(size - PIECE, 0) * number // PIECES)
            pieces.append(opened.read(PIECE))
    return _digest(str(size).encode(), *pieces)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()
