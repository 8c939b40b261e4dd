"""`PLAIT_TRACE_PLUGINS=1`: prints each call of a hook on rank 0, its time, and what it changed. Imports no torch."""

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from plait.system.torch_internals.compiler import has_compiled_call
from plait.system.torch_internals.modules import hooks_of, hooks_of_tensor

SHOWN = 4  # name patterns shown per line
Seen = dict[str, tuple[Any, dict[str, Any]]]  # name -> (the object, kept so that its id is not reused; its properties)


def traced(name: str, hook: str, call: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
    """Returns `call()`, a generator as a list. Rank 0 prints its time and, by name patterns, what changed."""
    if _rank() != 0:
        return call()
    model, run = arguments.get("model"), arguments.get("run")
    before = _seen(model, run)
    start = time.perf_counter()
    answer = call()
    answer = list(answer) if isinstance(answer, Iterator) else answer
    head = f"[plait] {name}.{hook} {1000 * (time.perf_counter() - start):.2f} ms"
    after = _seen(answer if hasattr(answer, "named_modules") else model, run)
    lines = [line for kind in after for line in _lines(kind, before.get(kind, {}), after[kind])]
    if hook == "build_mesh" and isinstance(answer, list | tuple):
        lines += [repr(item) for item in answer]
    head += ": nothing changed" if after and not lines else ""
    print("\n          ".join([head, *lines]), flush=True)
    return answer


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    started = dist is not None and dist.is_available() and dist.is_initialized()
    return dist.get_rank() if dist and started else int(os.environ.get("RANK", "0"))


def _seen(model: Any, run: Any) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    if hasattr(model, "named_modules"):
        seen["modules"] = {name: (module, _module(module)) for name, module in model.named_modules()}
        seen["parameters"] = {name: (param, _tensor(param)) for name, param in model.named_parameters()}
        seen["buffers"] = {name: (buffer, _tensor(buffer)) for name, buffer in model.named_buffers()}
    if hasattr(run, "strategies"):
        seen["strategies"] = {name: (each, {"options": repr(each)}) for name, each in run.strategies.items()}
        seen["settings"] = {"run": (run, {"storage_device": run.storage_device})}
    return seen


def _module(module: Any) -> dict[str, Any]:
    held = getattr(module, "_transforms", None)
    transforms = [name for name, fns in held.of.items() for _ in fns] if held else []
    own = "compiled" if has_compiled_call(module) else "its own" if "forward" in vars(module) else "its class's"
    facts: dict[str, Any] = {
        "class": type(module).__name__,
        "forward": own,
        "transforms": ", ".join(transforms) or "none",
    }
    return facts | {kind: len(hooks) for kind, hooks in hooks_of(module).items()}


def _tensor(tensor: Any) -> dict[str, Any]:
    placed = "plain"
    if hasattr(tensor, "placements"):
        axes = tensor.device_mesh.mesh_dim_names or ["?"] * len(tensor.placements)
        placed = ", ".join(f"{axis}: {each}" for axis, each in zip(axes, tensor.placements, strict=True))
    looks: dict[str, Any] = {"placements": placed, "shape": tuple(tensor.shape), "dtype": tensor.dtype}
    return looks | {"device": tensor.device, "gradient hooks": hooks_of_tensor(tensor)}


def _changes(old: Seen, new: Seen) -> Iterator[tuple[str, str]]:
    """(change, name) of everything that differs, except what only followed its module."""
    now = {id(each): name for name, (each, _) in new.items()}
    known = {id(each) for each, _ in old.values()}
    for name, (each, facts) in old.items():
        parent, _, leaf = name.rpartition(".")
        moved = now.get(id(each))
        if name in new:
            other, after = new[name]
            what = [f"{key} {facts[key]} -> {after[key]}" for key in facts if facts[key] != after[key]]
            if other is not each:
                inside = moved is not None and moved.startswith(f"{name}.".lstrip("."))
                what.insert(0, "wrapped" if inside else "replaced")
            if what:
                yield ", ".join(what), name
        elif moved is not None:
            around = now.get(id(old[parent][0])) if parent in old else None
            if around is None or moved != f"{around}.{leaf}".lstrip("."):
                yield "renamed", f"{name} -> {moved}"
        elif parent not in old or parent in new:
            yield "removed", name
    for name, (each, facts) in new.items():
        parent = name.rpartition(".")[0]
        if name not in old and id(each) not in known and (parent not in new or parent in old):
            yield f"added {next(iter(facts.values()))}", name


def _lines(kind: str, old: Seen, new: Seen) -> Iterator[str]:
    """A line per kind of change, with what it applies to: `layers.*` if all of them, else how many."""
    every = Counter(_pattern(name) for name in old.keys() | new.keys())
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for what, name in _changes(old, new):
        groups[what][_pattern(name)].append(name)
    for what, found in groups.items():
        shown = []
        for pattern, names in found.items():
            total = every[pattern.partition(" -> ")[0]]
            some = names[0] if len(names) == 1 else f"{pattern} ({len(names)} of {total})"
            shown.append((pattern if len(names) == total else some) or "the whole model")
        if what != "renamed" and sum(map(len, found.values())) == len(new) > 1:
            shown = [f"all {len(new)}"]
        elif len(shown) > SHOWN:
            shown[SHOWN:] = [f"and {len(shown) - SHOWN} more"]
        yield f"{kind}: {what}: {', '.join(shown)}"


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
