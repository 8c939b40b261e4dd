"""What is in a package that may be absent, such as a command: the sentence that says which to install."""

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
