"""What torch and Hydra keep private is used in few files, each of which says what it needs and who tests it.

A later release may drop such a name without a word: then these files are what to mend, and no other.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.test_house import PACKAGES, ROOT

CORE = ROOT / "core" / "plait"
# File -> what it is the only one to use.
SEAMS = {
    "core/plait/compose/hydra_internals.py": "Hydra",
    "core/plait/launch/agent.py": "elastic's agent",
    "core/plait/launch/handler.py": "elastic's rendezvous",
    "core/plait/parallel/transform.py": "a module's table of parameters, read in every forward",
    "core/plait/system/torch_internals/checkpoint_files.py": "metadata of distributed checkpoints",
    "core/plait/system/torch_internals/collectives.py": "functional collectives",
    "core/plait/system/torch_internals/compiler.py": "the compiler",
    "core/plait/system/torch_internals/dtensors.py": "DTensor",
    "core/plait/system/torch_internals/groups.py": "process groups",
    "core/plait/system/torch_internals/idle_casts.py": "a pass of inductor's",
    "core/plait/system/torch_internals/memory.py": "memory",
    "core/plait/system/torch_internals/meshes.py": "device meshes",
    "core/plait/system/torch_internals/modules.py": "hooks and children of modules",
    "plugins/testing/src/plait_testing/propagated.py": "DTensor's sharding propagation",
    "plugins/testing/src/plait_testing/torch_internals.py": "hooks, groups, modes and caches that suites look at",
    "examples/ddp/src/plait_ddp/buckets.py": "the end of backward",
    "plugins/autoparallel/src/plait_autoparallel/advisor/strategies.py": "DTensor's sharding propagation",
    "plugins/context_parallel/src/plait_context_parallel/collectives.py": "functional collectives",
    "plugins/expert_parallel/src/plait_expert_parallel/collectives.py": "functional collectives",
    "plugins/fsdp2/src/plait_fsdp2/torch_internals.py": "views, storages, joined meshes",
    "plugins/pipeline/src/plait_pipeline/stage.py": "the backward of stages",
    "plugins/plan/src/plait_plan/torch_internals.py": "modes, fake tensors, nodes of autograd, the backward of stages",
    "plugins/plan/src/plait_plan/tracing/compiled.py": "graphs of inductor",
    "plugins/simplefsdp/src/plait_simplefsdp/inductor.py": "inductor",
    "plugins/simplefsdp/src/plait_simplefsdp/torch_internals.py": "groups, graphs, the partitioner",
    "plugins/tensor_parallel/src/plait_tensor_parallel/torch_internals.py": "explicit redistribution, overlap",
    "plugins/transformers/src/plait_transformers/torch_internals.py": "modes, storages",
    "plugins/zero/src/plait_zero/torch_internals.py": "joined meshes, shards of shards, the end of backward",
}
DOCUMENTED = ("_foreach_", "_check")  # of torch itself: its own pages have these, with their underscore
OTHERS = {  # of the standard library, and of transformers, whose models have them
    *("_exit", "_getframe", "_current_frames", "_run_exitfuncs", "_shutdown", "_processes", "_command", "_path"),
    *("_finished", "_registered"),
    *("_actions", "_option_string_actions", "_init_weights", "_from_config", "_attn_implementation"),
    *("_apply_gate", "_sysconfigdata"),
}
PRIVATE_MODULE = re.compile(r"(torch|hydra|omegaconf|functorch)(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


def files() -> dict[str, Path]:
    found = [file for package in (CORE, *PACKAGES) for file in package.rglob("*.py") if "template" not in file.parts]
    assert len(found) > 300
    return {str(file.relative_to(ROOT)): file for file in found if "conf" not in file.parts}


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def own_names() -> frozenset[str]:
    """The private names that Plait's classes give to methods and fields, and its files to attributes of `self`."""
    names: set[object] = set()
    for file in files().values():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                names |= {getattr(each, "name", "") for each in node.body}
                given = [t for each in node.body for t in getattr(each, "targets", [getattr(each, "target", None)])]
                names |= {each.id for each in given if isinstance(each, ast.Name)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Dict):  # `module.__dict__ |= {"_fqn": fqn}`
                names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return frozenset(str(name) for name in names)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(file: Path) -> Iterator[str]:
    """The private names of others in a file, each with its line."""
    prose = {id(node.value) for node in ast.walk(tree(file)) if isinstance(node, ast.Expr) and _is_text(node.value)}
    for node in ast.walk(tree(file)):
        for name in _named_by(node):
            if id(node) not in prose:
                yield f"{node.lineno}: {name}"  # type: ignore[attr-defined]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _named_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names if PRIVATE_MODULE.fullmatch(name.name)]
    if isinstance(node, ast.ImportFrom):
        return [name for each in node.names if PRIVATE_MODULE.fullmatch(name := f"{node.module}.{each.name}")]
    if isinstance(node, ast.Attribute):
        if not _is_private(node.attr):
            return []
        if ast.unparse(node.value).endswith("aten"):
            return []  # an operator: its name is part of torch's format for graphs
        text = ast.unparse(node)
        written = text.startswith("super(") or (PRIVATE_MODULE.fullmatch(text) and not _documented(text))
        return [text] if written or _is_foreign(node.attr) else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "mock.patch.object"):
        if ast.unparse(node.args[0]).endswith("aten"):
            return []
        name = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
        return [name] if _is_foreign(name) else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE_MODULE.fullmatch(node.value):
        return [node.value]
    return []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def _is_foreign(name: str) -> bool:
    """Whether nobody of Plait gives such a name, nor those whose private names are not watched."""
    return _is_private(name) and name not in own_names() | OTHERS and not _documented(name)


def _documented(text: str) -> bool:
    return text.removeprefix("torch.").startswith(DOCUMENTED)


def test_only_the_files_of_the_table_use_what_torch_and_hydra_keep_private():
    used = {name: found for name, file in files().items() if (found := sorted(set(private_names(file))))}
    assert {name: found for name, found in used.items() if name not in SEAMS} == {}
    assert SEAMS.keys() - used.keys() == set(), "these use none any more"


@pytest.mark.parametrize("name", SEAMS)
def test_such_a_file_says_what_it_needs_and_which_tests_would_fail(name):
    text = " ".join((ast.get_docstring(tree(ROOT / name)) or "").split())
    needs = re.search(r"Needs (.+?) in (torch 2\.11|Hydra 1\.3)", text)
    assert needs is not None, text
    tests = re.findall(r"[\w/]*tests/[\w/]+\.py", text)
    assert tests
    assert [test for test in tests if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("from torch._dynamo import list_backends", ["torch._dynamo.list_backends"]),
        ("from torch.distributed.pipelining import _backward", ["torch.distributed.pipelining._backward"]),
        ("import hydra._internal.utils", ["hydra._internal.utils"]),
        ("torch._C._jit_pass()", ["torch._C", "torch._C._jit_pass"]),
        ("mesh._get_root_mesh()", ["mesh._get_root_mesh"]),
        ("super()._rendezvous()", ["super()._rendezvous"]),
        ("getattr(tensor, '_local_tensor')", ["_local_tensor"]),
        ("sys.modules.get('torch._dynamo')", ["torch._dynamo"]),
        ("torch._foreach_add_(some, 1)", []),
        ("os._exit(0)", []),
        ("self._found = 1", []),
        ("from torch import nn", []),
    ],
)
def test_a_private_name_is_seen_however_it_is_written(line, names, tmp_path):
    file = tmp_path / "some.py"
    file.write_text(line, encoding="utf-8")
    assert sorted(found.partition(": ")[2] for found in private_names(file)) == names
