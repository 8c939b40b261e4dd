"""What left the core for a package of its own: its options by name, and its modules as configs name them."""

from importlib.util import find_spec

from plait.contract.errors import PlaitError

PACKAGES = {"plait.data.": "plait_data."}  # a config of before names the one, and means the other
OPTIONS = {"plait-data": {"data": ("chat", "hf", "stdlib", "text")}}  # distribution -> group -> names


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
        if option in groups.get(group, ()):
            known = f"; installed: {', '.join(others)}" if others else ""
            said = f"{group}={option} is in {distribution}, which is not installed: pip install {distribution}{known}"
            return AbsentPackage(said).at(group, option, others or None)
    return None


def absent_target(key: str, target: str) -> AbsentPackage | None:
    """The same for the `_target_` of the node `key`."""
    for package in (each.rstrip(".") for each in PACKAGES.values()):
        if target.startswith(f"{package}.") and find_spec(package) is None:
            name = package.replace("_", "-")
            said = f"{key}._target_={target} is in {name}, which is not installed: pip install {name}"
            return AbsentPackage(said).at(f"{key}._target_", target)
    return None
