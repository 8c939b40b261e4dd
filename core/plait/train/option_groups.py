"""Options of some parameters: those of `optimizer.groups`, by patterns of names or axes, and no decay of vectors."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch.distributed as dist
from torch import nn

from plait.compose.targets import target_of
from plait.contract.errors import PlaitError, misfit, near_miss
from plait.contract.exact import fitted, parameters_of
from plait.contract.model_spec import matches
from plait.contract.packed import Packed
from plait.parallel.agreement import on_all_ranks
from plait.parallel.group import ParamGroup, part_of
from plait.parallel.optimizer_groups import mesh_of

KEY, DECAYS = "optimizer.groups", "optimizer.decays"
FITS = "a mapping from patterns of names to options, such as {layers.*.*.weight: {weight_decay: 0.0}}"
WHICH = ("matrices", "all")  # the values of `optimizer.decays`
Ruled = tuple[str | None, bool]  # of a parameter: the first pattern that matches it, whether it is spared


@attrs.frozen
class Rules:
    """Which parameters have options of their own.

    patterns: of names, or of logical axes behind an @ -> options, in the config's order.
    spares: whether `weight_decay` spares vectors, if no pattern gives them another.
    """

    patterns: Mapping[str, Mapping[str, Any]]
    spares: bool

    def options(self, choice: Ruled) -> dict[str, Any]:
        """What parameters of this choice have of their own."""
        pattern, spared = choice
        return {**({"weight_decay": 0.0} if spared else {}), **(self.patterns[pattern] if pattern else {})}

    def choices(self, group: ParamGroup) -> list[Ruled]:
        """Of each parameter of `group`. Raises PlaitError if there are patterns and no names."""
        if self.patterns and "names" not in group:
            raise PlaitError(
                f"{KEY} tells parameters by their names, and make_optimizer got none: pass it on as "
                "applied.optimizer(make), or give it applied.groups()"
            ).at(KEY)
        found = []
        for i in range(len(group["params"])):
            pattern = next((p for p in self.patterns if _means(p, group, i)), None)
            decided = "weight_decay" in group or (pattern and "weight_decay" in self.patterns[pattern])
            found.append((pattern, self.spares and not decided and is_vector(group, i)))
        return found


def options_and_rules(node: Mapping[str, Any]) -> tuple[dict[str, Any], Rules]:
    """(`node` without its `groups` and `decays`, what these say). Raises PlaitError for values that do not fit."""
    own = {key: value for key, value in node.items() if key not in ("groups", "decays")}
    which = node.get("decays", WHICH[0])
    if which not in WHICH:
        raise misfit(DECAYS, which, " or ".join(WHICH))
    if "weight_decay" in own:
        decay = own["weight_decay"]
    else:
        decay = getattr((parameters_of(target_of(own, "optimizer")) or {}).get("weight_decay"), "default", 0)
    return own, Rules(patterns_of(node.get("groups")), bool(decay) and which == WHICH[0])


def patterns_of(value: Any) -> dict[str, dict[str, Any]]:
    """Pattern -> options, in the config's order. Raises PlaitError for anything else, and for a rate that is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise misfit(KEY, value, FITS)
    for pattern, own in value.items():
        key = f"{KEY}.{pattern}"
        if not isinstance(own, Mapping) or not own:
            raise misfit(key, own, "a mapping from options to values, such as {lr: 0.001}")
        if "lr" in own:
            _check_rate(own["lr"], f"{key}.lr")
    return {str(pattern): dict(own) for pattern, own in value.items()}


def _check_rate(value: Any, key: str) -> None:
    try:
        fine = fitted(value, float) >= 0
    except ValueError:
        fine = False
    if not fine:
        raise misfit(key, value, "a number that is not negative")


def is_vector(group: ParamGroup, number: int) -> bool:
    """Whether this parameter of `group` has at most one dim, as norms and biases do, not counting that of experts."""
    if "logical" in group:
        return sum(axis != "experts" for axis in group["logical"][number]) <= 1
    return group["params"][number].dim() <= 1


def _axes(group: ParamGroup, number: int) -> str:
    """The logical axes of this parameter, as a pattern means them: `@ffn.embed`."""
    axes = group["logical"][number] if "logical" in group else ()
    return "@" + ".".join(str(axis.axis if isinstance(axis, Packed) else axis) for axis in axes)


def _means(pattern: str, group: ParamGroup, number: int) -> bool:
    return matches(pattern, _axes(group, number) if pattern.startswith("@") else group["names"][number])


def divided(groups: Iterable[ParamGroup], rules: Rules) -> list[ParamGroup]:
    """`groups`, each divided by what its parameters have of their own, with these options in the group: first those
    that no pattern matches, then in the patterns' order; spared ones after others."""
    order = {pattern: i for i, pattern in enumerate((None, *rules.patterns))}
    found = []
    for group in groups:
        choices = rules.choices(group)
        for choice in sorted(set(choices), key=lambda choice: (order[choice[0]], choice[1])):
            numbers = [i for i, own in enumerate(choices) if own == choice]
            found.append({**part_of(group, numbers), **rules.options(choice)})
    return found


def unmatched(groups: Iterable[ParamGroup], patterns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The patterns that match no parameter in `groups`."""
    every = [(group, i) for group in groups for i in range(len(group.get("names", ())))]
    return [pattern for pattern in patterns if not any(_means(pattern, *each) for each in every)]


def refused(pattern: str, groups: Iterable[ParamGroup]) -> PlaitError:
    """The error for a pattern that matches nothing."""
    every = [(group, i) for group in groups for i in range(len(group.get("names", ())))]
    by_axes = pattern.startswith("@")
    names = list(dict.fromkeys(_axes(group, i) if by_axes else group["names"][i] for group, i in every))
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    what = "axis" if by_axes else "name"
    return PlaitError(
        f"{KEY}: the pattern {pattern!r} matches no parameter that trains; * stands for one {what}, and there are "
        f"{some or 'none'}{near_miss(pattern, names)}"
    ).at(KEY, pattern, fits=names)


def check_patterns(groups: list[ParamGroup], patterns: Mapping[str, Any], alone: bool = False) -> None:
    """Raises PlaitError if a pattern matches a parameter on no rank: each may have only some of the model's layers.

    alone: this process has all of them.
    """
    group = dist.group.WORLD if dist.is_initialized() and not alone else None
    answers = on_all_ranks(lambda: unmatched(groups, patterns), group=group)
    for pattern in patterns:
        if all(pattern in without for without in answers):
            raise refused(pattern, groups)


def groups_by_mesh(parameters: Iterable[Any]) -> list[ParamGroup]:
    """The given groups, or plain parameters that train, or all if none does, with one group per mesh."""
    every = list(parameters)
    if every and isinstance(every[0], Mapping):
        return [dict(group) for group in every]
    groups: dict[object, list[nn.Parameter]] = {}
    for param in [param for param in every if param.requires_grad] or every:
        groups.setdefault(mesh_of(param), []).append(param)
    return [{"params": group} for group in groups.values()]


def check_known(node: Mapping[str, Any], pattern: str, own: Iterable[str], defaults: Iterable[str]) -> None:
    """Raises PlaitError for an option that the optimizer has no value of for each group.

    defaults: the options of its groups, by the optimizer.
    """
    takes = sorted(defaults)
    for name in own:
        if name not in takes:
            raise PlaitError(
                f"unknown option {KEY}.{pattern}.{name}; a group of {node['_target_']} takes {', '.join(takes)}"
                f"{near_miss(name, takes)}"
            ).at(f"{KEY}.{pattern}.{name}", fits=takes)
