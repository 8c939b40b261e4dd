"""What left the core for a package of its own: its options by name, and its modules as configs name them."""

from fnmatch import fnmatch
from importlib.util import find_spec

from plait.contract.errors import PlaitError, absent

PACKAGES = {  # a config of before names the one, and means the other
    "plait.data.": "plait_data.",
    "plait.models.": "plait_models.",
}
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {  # distribution -> group -> names, or patterns of names
    "plait-data": {"data": ("chat", "hf", "masked", "mix", "pairs", "stdlib", "text")},
    "plait-models": {"model": ("llama3_*", "qwen3_*", "deepseek_v3_*")},
}


class AbsentPackage(PlaitError):
    """What a config asks for is in a package that is not installed; the sentence names it."""


def current(target: str) -> str:
    """The name of the class or function that `target` names, where it is now."""
    old = next((old for old in PACKAGES if target.startswith(old)), None)
    return target if old is None else PACKAGES[old] + target.removeprefix(old)


def absent_option(group: str, option: str, others: list[str]) -> AbsentPackage | None:
    """The error for the option if its package is not installed; None if it is in no such package. others: options of
    this group that are installed."""
    for distribution, groups in OPTIONS.items():
        known_there = any(fnmatch(option, name) for name in groups.get(group, ()))
        if known_there and not _is_installed(distribution):
            known = f"; installed: {', '.join(others)}" if others else ""
            return AbsentPackage(absent(f"{group}={option}", distribution) + known).at(group, option, others or None)
    return None


def absent_target(key: str, target: str) -> AbsentPackage | None:
    """The same for the `_target_` of the node `key`."""
    for package in (each.rstrip(".") for each in PACKAGES.values()):
        name = package.replace("_", "-")
        if target.startswith(f"{package}.") and not _is_installed(name):
            return AbsentPackage(absent(f"{key}._target_={target}", name)).at(f"{key}._target_", target)
    return None


def _is_installed(distribution: str) -> bool:
    return find_spec(distribution.replace("-", "_")) is not None
