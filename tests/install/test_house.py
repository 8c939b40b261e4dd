"""Rules of the house that only hold while somebody looks: where things lie, and who may name whom."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.contract.kinds import KINDS

ROOT = Path(__file__).parents[2]
PLUGINS = [p.parent for p in sorted(ROOT.glob("plugins/*/pyproject.toml"))]
PACKAGES = [
    file.parent for kind in ("plugins", "examples") for file in sorted(ROOT.glob(f"{kind}/*/src/*/__init__.py"))
]
PROJECTS = [*PLUGINS, Path(__file__).parent / "stranger"]


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def strategies(folder: Path) -> dict[str, str]:
    return project(folder)["entry-points"].get("plait.strategies", {})


def core_files() -> list[Path]:
    found = [p for p in ROOT.glob("core/**/*.py") if "conf" not in p.parts]
    assert len(found) > 40
    return found


def test_the_core_finds_the_shipped_conf_through_a_link():
    link = ROOT / "core" / "plait" / "conf"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == (ROOT / "conf").resolve()
    assert (link / "train.yaml").is_file()


@pytest.mark.parametrize(
    "conf", [ROOT / "conf", *(c for p in PROJECTS for c in p.glob("src/*/conf"))], ids=lambda c: c.parent.name
)
def test_every_conf_folder_is_a_package(conf):
    folders = [conf, *(f for f in conf.rglob("*") if f.is_dir() and f.name != "__pycache__")]
    assert len(folders) > 1
    for folder in folders:
        assert (folder / "__init__.py").is_file(), folder


def test_hydra_plugins_is_a_namespace():
    assert not (ROOT / "core" / "hydra_plugins" / "__init__.py").exists()


def test_the_core_names_no_strategy_and_imports_none():
    names = {name for folder in PLUGINS for name in strategies(folder)}
    packages = {target.partition(":")[0] for folder in PLUGINS for target in strategies(folder).values()}
    assert "fsdp2" in names
    words = {"zero"}  # a word of the language too: only the whole of a string is the name
    alone = "|".join(sorted((names | packages) - words))
    anywhere = re.compile(rf"\b({alone})\b|[\"']({'|'.join(words)})[\"']")
    for file in core_files():
        text = file.read_text()
        assert not anywhere.search(text), f"{file} names {anywhere.search(text)[0]}"
        for node in ast.walk(ast.parse(text)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [m for m in modules if m.startswith("plait_")], file


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda p: p.name)
def test_a_plugin_says_what_it_is(folder):
    """The hook API beside each strategy, an options file for each strategy or model, the core as a dependency."""
    entries = project(folder)["entry-points"]
    assert entries.get("plait.api", {}).keys() == strategies(folder).keys()
    assert entries.keys() & {kind.group for kind in KINDS.values()}
    assert any(re.match(r"plait\b", d) for d in project(folder)["dependencies"])
    for name, package in entries.get("plait.models", {}).items():
        assert "_target_: " in (folder / "src" / package / "conf" / "model" / f"{name}.yaml").read_text()
    for name, target in strategies(folder).items():
        options = folder / "src" / target.partition(":")[0] / "conf" / "strategy" / f"{name}.yaml"
        assert f"# @package strategy.{name}" in options.read_text()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_needs_the_core_alone_and_has_the_licence(package):
    folder = package.parents[1]
    assert project(folder)["license-files"] == ["LICENSE"]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (package / "py.typed").is_file()
    needs = [need for need in project(folder)["dependencies"] if re.match(r"plait(-core)?\b[^-]", need)]
    assert [need.partition(">=")[0] for need in needs] == ["plait-core"]


def import_contracts() -> tuple[set[str], dict[str, dict]]:
    """The packages whose imports `make lint` reads, and its contracts by their kind."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return set(linter["root_packages"]), {contract["type"]: contract for contract in linter["contracts"]}


def test_lint_reads_the_imports_of_every_plugin_and_example():
    packages = {folder.name for folder in PACKAGES}
    assert len(packages) > 12
    read, contracts = import_contracts()
    assert read == packages | {"plait"}
    assert set(contracts["independence"]["modules"]) == packages


def test_lint_reads_the_types_of_every_plugin_and_example():
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    sources = {str(folder.parent.relative_to(ROOT)) for folder in PACKAGES}
    assert set(read["mypy_path"]) == sources | {".", "core", "tools/mutation/src"}
    wanted = {folder for each in PACKAGES for folder in (each.parent, each.parents[1] / "tests") if folder.is_dir()}
    assert wanted <= {found for line in read["files"] for found in ROOT.glob(line)}


def test_plugins_may_import_the_modules_of_the_compatibility_page():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    public = set(re.findall(r"^\| `(plait\.[\w.]+)` \|", page, re.MULTILINE)) - {"plait.planning"}  # a part of `plait`
    allowed = import_contracts()[1]["forbidden"]["ignore_imports"]
    assert {line.removeprefix("** -> ") for line in allowed} == public


def imports_of(package: Path) -> dict[str, set[str]]:
    """Module of a package -> those of its modules that it imports: when it runs, for types alone, or, as its stub says,
    when somebody asks it for a name."""
    files = defaultdict(list)
    for file in package.rglob("*.py*"):
        if file.suffix in (".py", ".pyi") and "template" not in file.parts:
            name = ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            files[name].append(ast.parse(file.read_text(encoding="utf-8")))
    found: dict[str, set[str]] = {}
    for name, trees in files.items():
        targets = set()
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= inner & files.keys() or {node.module or ""}
        found[name] = targets & files.keys() - {name}
    return found


@pytest.mark.parametrize("package", [ROOT / "core" / "plait", *PACKAGES], ids=lambda p: p.name)
def test_no_file_imports_itself_through_others(package):
    """The import contract reads no stubs, and sees no circle between a package's `__init__` and a file in it."""
    order = graphlib.TopologicalSorter(imports_of(package))
    order.prepare()  # raises CycleError with the circle


@functools.cache
def code_lines(path: Path) -> int:
    """Lines that are neither empty nor comment nor docstring."""
    text = path.read_text()
    prose: set[int] = set()
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            prose |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in prose for i, line in lines)


STEPS = {  # who steps an optimizer, and why not by Applied.step
    "core/plait/parallel/applied.py": "the step",
    "core/plait/train/rehearsal.py": "a rehearsal: whether the optimizer can step",
    "core/plait/train/optimizer_trials.py": "a rehearsal: what the optimizer computes of shards",
    "plugins/plan/src/plait_plan/tracing/step.py": "a rehearsal: its states, before the step that is traced",
    "plugins/testing/src/plait_testing/foreign/runs.py": "a step of other people's code, which plait verify compares",
}


def test_nobody_else_steps_an_optimizer():
    calls = [
        str(file.relative_to(ROOT))
        for file in (*core_files(), *ROOT.glob("plugins/*/src/**/*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
        if "optimizer" in ast.unparse(node.func.value)
    ]
    assert sorted(calls) == sorted(STEPS)  # each of them once


def test_what_runs_a_training_step_stays_small():
    """All that importing the trainer brings: strategies, mesh, set-up, the loop, and its saves and numbers.

    The only number of its kind: what a step of training is made of must fit into one head.
    """
    program = (
        "import sys, plait.train.trainer; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('plait')))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    files = [Path(name) for name in found.stdout.split()]
    assert len(files) > 30
    assert sum(map(code_lines, files)) < 5100


def test_what_a_reader_enters_before_ranks_start_stays_few(tmp_path):
    """Files of the core with a function that is called between the composed config and the start of ranks."""
    program = Path(__file__).with_name("files_entered.py")
    overrides = ["strategy=[fsdp2]", "launch.device=cpu", "launch.nproc_per_node=2", "run.name=a"]
    done = subprocess.run(
        [sys.executable, program, *overrides], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    files = [line for line in done.stderr.splitlines() if line.endswith(".py")]
    assert files[0] == "commands/start.py"
    assert {"check/check.py", "check/prepare.py"} <= {*files}
    assert len(files) <= 71, files


def test_the_optimizer_of_a_config_is_made_without_hydra():
    """So one's own loop needs 0.3 s less to start."""
    program = (
        "import sys, torch\nfrom plait.host import make_optimizer\n"
        "make_optimizer({'_target_': 'torch.optim.AdamW', 'lr': 0.1}, [torch.nn.Parameter(torch.ones(2))])\n"
        "print('omegaconf' in sys.modules or 'hydra' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_tests_that_need_a_gpu_lie_together():
    """`make gpu` collects one folder: the others import what a machine with a GPU may lack."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]
    marked = [file for file in files if "mark." + "gpu" in file.read_text()]
    assert {file.parent for file in marked} == {ROOT / "tests" / "gpu"}


SHARED = {
    "Mesh": "the one in parallel implements the protocol in contract, and both are plait.Mesh to a strategy",
}


def test_no_two_classes_of_the_core_and_one_plugin_share_a_name():
    """A type alias counts where a class has its name: a reader takes it for the class."""
    core = set(named(ROOT / "core/plait"))
    for package in (ROOT / "core/plait", *(folder / "src" for folder in PROJECTS)):
        places = defaultdict(set)
        for name, is_class, file in core | set(named(package)):
            places[name].add((is_class, file))
        twice = {n: found for n, found in places.items() if len(found) > 1 and any(is_class for is_class, _ in found)}
        assert twice.keys() <= SHARED.keys(), {n: sorted(f for _, f in twice[n]) for n in twice.keys() - SHARED.keys()}


def named(package: Path) -> Iterator[tuple[str, bool, str]]:
    """(name, whether it is a class, file) of every class and type alias at the top of a module, but private ones."""
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_class = isinstance(node, ast.ClassDef)
            given = [node] if is_class else getattr(node, "targets", [])
            for name in (str(getattr(each, "name", getattr(each, "id", ""))) for each in given):
                if re.fullmatch("[A-Z][A-Za-z]*[a-z]", name):
                    yield name, is_class, str(path.relative_to(ROOT))
