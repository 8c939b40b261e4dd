"""What is in a package that may be absent, such as a command: the sentence that says which to install."""

from fnmatch import fnmatch
from importlib.util import find_spec

from plait.contract.errors import PlaitError, absent

COMMANDS = {  # name -> distribution
    "calibrate": "plait-plan",
    "compare": "plait-report",
    "convert": "plait-models",
    "data": "plait-data",
    "eval": "plait-use",
    "new": "plait-testing",
    "plan": "plait-plan",
    "push": "plait-use",
    "ray": "plait-ray",
    "report": "plait-report",
    "sample": "plait-use",
    "verify": "plait-testing",
}
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {  # distribution -> group -> names, or patterns of names
    "plait-data": {"data": ("chat", "hf", "masked", "mix", "pairs", "stdlib", "text")},
    "plait-models": {"model": ("llama3_*", "qwen3_*", "deepseek_v3_*")},
}


class AbsentPackage(PlaitError):
    """What a config asks for is in a package that is not installed; the sentence names it."""


def absent_command(name: str) -> PlaitError | None:
    """The error for the command `name`, which is not installed; None if no package of Plait's has it."""
    package = COMMANDS.get(name)
    return None if package is None else PlaitError(absent(f"plait {name}", package)).at(name)


def absent_name(name: str, module: str, error: ModuleNotFoundError) -> Exception:
    """The error for what comes from `module`, if its package is not installed; else `error` itself."""
    package = module.partition(".")[0]
    return AbsentName(absent(name, package.replace("_", "-"))) if error.name == package else error


class AbsentName(PlaitError, ImportError):
    """What `plait` exports is in a package that is not installed: code that does without may catch an ImportError."""


def absent_option(group: str, option: str, others: list[str]) -> AbsentPackage | None:
    """The error for the option if its package is not installed; None if it is in no such package. others: options of
    this group that are installed."""
    for distribution, groups in OPTIONS.items():
        known_there = any(fnmatch(option, name) for name in groups.get(group, ()))
        if known_there and not find_spec(_module(distribution)):
            known = f"; installed: {', '.join(others)}" if others else ""
            return AbsentPackage(absent(f"{group}={option}", distribution) + known).at(group, option, others or None)
    return None


def absent_target(key: str, target: str) -> AbsentPackage | None:
    """The same for the `_target_` of the node `key`."""
    for distribution in OPTIONS:
        if target.startswith(f"{_module(distribution)}.") and not find_spec(_module(distribution)):
            return AbsentPackage(absent(f"{key}._target_={target}", distribution)).at(f"{key}._target_", target)
    return None


def _module(distribution: str) -> str:
    return distribution.replace("-", "_")
