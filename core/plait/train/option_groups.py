"""`optimizer.groups`: parameters, by patterns of their names, that an optimizer updates with options of their own."""

from collections.abc import Iterable, Mapping
from typing import Any

from plait.contract.errors import PlaitError, misfit
from plait.contract.exact import fitted
from plait.contract.model_spec import matches
from plait.parallel.group import ParamGroup, part_of

KEY = "optimizer.groups"
FITS = "a mapping from patterns of names to options, such as {layers.*.*.weight: {weight_decay: 0.0}}"


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


def divided(groups: Iterable[ParamGroup], patterns: Mapping[str, Mapping[str, Any]]) -> list[ParamGroup]:
    """`groups`, each divided by the first pattern that matches a parameter's name: first what none matches, then in the
    patterns' order, with their options in the group. Raises PlaitError if there are patterns and no names."""
    found = []
    for group in groups:
        if "names" not in group:
            raise PlaitError(
                f"{KEY} tells parameters by their names, and make_optimizer got none: pass it on as "
                "applied.optimizer(make), or give it applied.groups()"
            ).at(KEY)
        first = [next((p for p in patterns if matches(p, fqn)), None) for fqn in group["names"]]
        for pattern in (None, *patterns):
            if numbers := [i for i, matched in enumerate(first) if matched == pattern]:
                found.append({**part_of(group, numbers), **(patterns[pattern] if pattern else {})})
    return found


def unmatched(groups: Iterable[ParamGroup], patterns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The patterns that match the name of no parameter in `groups`."""
    names = [fqn for group in groups for fqn in group.get("names", ())]
    return [pattern for pattern in patterns if not any(matches(pattern, fqn) for fqn in names)]


def refused(pattern: str, groups: Iterable[ParamGroup]) -> PlaitError:
    """The error for a pattern that matches nothing."""
    names = [fqn for group in groups for fqn in group.get("names", ())]
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return PlaitError(
        f"{KEY}: the pattern {pattern!r} matches no parameter that trains; * stands for one name, and there are "
        f"{some or 'none'}"
    ).at(KEY, pattern, fits=names)


def check_known(node: Mapping[str, Any], pattern: str, own: Iterable[str], defaults: Iterable[str]) -> None:
    """Raises PlaitError for an option that the optimizer has no value of for each group.

    defaults: the options of its groups, by the optimizer.
    """
    takes = sorted(defaults)
    for name in own:
        if name not in takes:
            raise PlaitError(
                f"unknown option {KEY}.{pattern}.{name}; a group of {node['_target_']} takes {', '.join(takes)}"
            ).at(f"{KEY}.{pattern}.{name}", fits=takes)
