"""What DTensor has worked out about operators, kept over the process groups of a rank.

torch has to forget it with each run (`plait.host.forget_plans`), because it names meshes of groups that have ended, and
would work it out again, for milliseconds per operator. Here it is kept without groups, and given out on the meshes of
the arguments for which it is asked, so nothing of an ended group comes back.

Needs `DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached` with its tables of operators,
`OpSchema`, `OutputSharding`, and the attributes of `DTensorSpec` and `DeviceMesh`, in torch 2.11 to 2.15. Test:
plugins/testing/tests/test_propagated.py.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

OF_GROUPS = ("_pg_registry", "_root_mesh", "_flatten_mapping")  # of a mesh, and no part of how it compares
INFOS = ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy")  # which arguments besides tensors count


def keep() -> None:
    """From now on this process works out once what an operator does with arguments of one kind."""
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    tables = [table for name in INFOS if (table := getattr(propagator, name, None)) is not None]
    propagator.propagate_op_sharding_non_cached = once(propagator.propagate_op_sharding_non_cached, tables)


def once(propagate: Callable[[Any], Any], infos: Iterable[Any] = ()) -> Callable[[Any], Any]:
    """`propagate`, from OpSchema to OutputSharding, which is called once for equal schemas. infos: tables of operators
    of which an argument besides tensors may count."""
    from torch.distributed.tensor._sharding_prop import _are_we_tracing

    answers: dict[Any, Any] = {}
    bare: dict[Any, Any] = {}

    def answered(schema: Any) -> Any:
        incomplete = schema.schema_info is None and any(schema.op in table for table in infos)  # in a decomposition
        if incomplete or _are_we_tracing():
            return propagate(schema)
        try:
            known = answers.get(schema)
        except TypeError:  # an argument has no hash
            return propagate(schema)
        own = {mesh: mesh for mesh in _meshes((schema.args_schema, schema.kwargs_schema))}
        if known is not None:
            return _answer_on(own, known)
        found = propagate(schema)
        for mesh in own:
            empty = _without_groups(mesh)
            bare.setdefault(empty, empty)
        with contextlib.suppress(KeyError):  # it answers on a mesh that no argument has
            answers[_schema_on(bare, schema)] = _answer_on(bare, found)
        return found

    return answered


def _without_groups(mesh: Any) -> Any:
    """A mesh that equals `mesh`, and through which nobody can talk."""
    found = object.__new__(type(mesh))
    vars(found).update({name: value for name, value in vars(mesh).items() if name not in OF_GROUPS})
    return found


def _answer_on(meshes: Mapping[Any, Any], answer: Any) -> Any:
    found = copy.copy(answer)
    vars(found).pop("mesh", None)  # torch remembers it there
    found.output_spec = _on(meshes, answer.output_spec)
    if answer.redistribute_schema is not None:
        found.redistribute_schema = _schema_on(meshes, answer.redistribute_schema)
    return found


def _schema_on(meshes: Mapping[Any, Any], schema: Any) -> Any:
    arguments, named = _on(meshes, (schema.args_schema, schema.kwargs_schema))
    return type(schema)(schema.op, arguments, named, schema_info=schema.schema_info)


def _on(meshes: Mapping[Any, Any], values: Any) -> Any:
    """`values`, in which each DTensorSpec is a copy on the mesh of `meshes` that equals its own."""

    def moved(value: Any) -> Any:
        if not _is_spec(value):
            return value
        spec = copy.copy(value)
        spec.mesh = meshes[value.mesh]
        return spec

    return tree_map(moved, values, is_leaf=_is_spec)


def _meshes(values: Any) -> list[Any]:
    return [value.mesh for value in tree_leaves(values, is_leaf=_is_spec) if _is_spec(value)]


def _is_spec(value: Any) -> bool:
    return hasattr(value, "placements")
