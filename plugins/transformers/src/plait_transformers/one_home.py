"""One home for a parameter that two modules have, one inside the other: an encoder's head also names the bias of its
Linear, which it does not read itself."""

from typing import Any

from plait import mix_in


def give_one_home(model: Any) -> dict[str, str]:
    """Let only the inner of two such modules have the parameter. Returns its FQN -> the name in files."""
    names: dict[str, str] = {}
    for fqn, module in list(model.named_modules()):
        inner = {id(p): name for child, m in module.named_children() for name, p in m.named_parameters(child)}
        for name, param in list(module.named_parameters(recurse=False)):
            if (home := inner.get(id(param))) is not None:
                delattr(module, name)
                mix_in(module, type("Named", (), {name: _parameter(home)}))  # `_init_weights` asks for it
                names[f"{fqn}.{home}"] = f"{fqn}.{name}"
                model.all_tied_weights_keys.pop(f"{fqn}.{home}", None)
    return names


def _parameter(fqn: str) -> property:
    return property(lambda module: module.get_parameter(fqn))
