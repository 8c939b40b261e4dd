"""What a word of other tools is called here: `lr` and `--learning-rate` are optimizer.lr."""

import functools
from importlib.resources import files

from plait.compose.keys import of_a_run
from plait.contract.errors import PlaitError, near_miss, unknown_key


@functools.cache
def words() -> dict[str, list[str]]:
    """What to write here -> the words of other tools for it."""
    import yaml

    table = yaml.safe_load(files("plait.conf").joinpath("words.yaml").read_text(encoding="utf-8"))
    return {here: str(others).split() for here, others in table.items()}


def meant(word: str) -> tuple[str, ...]:
    """What to write for a word of another tool, such as `("optimizer.lr",)` for `--learning-rate`."""
    name = word.lstrip("-+~").partition("=")[0].rpartition(".")[2].replace("-", "_").lower()
    return tuple(here for here, others in words().items() if name in others)


def elsewhere(key: str) -> tuple[str, ...]:
    """The keys of other nodes that end like this one: `("train.seed",)` for `seed`."""
    keys = (each.path for each in of_a_run() if not each.path.startswith("hydra."))
    return tuple(each for each in keys if "." in each and each.rpartition(".")[2] == key.rpartition(".")[2])


def unknown(key: str, known: list[str]) -> PlaitError:
    """The error for a key that does not exist; `known`: those of its node."""
    mistyped = "." in key and near_miss(key.rpartition(".")[2], known)
    if here := meant(key) or (() if mistyped else elsewhere(key)):
        return PlaitError(f"unknown key {key}; here it is {' or '.join(here)}").at(key, fits=here)
    return unknown_key(key, known)


def unknown_flag(flag: str) -> PlaitError:
    """The error for a flag that `plait train` does not have."""
    here = meant(flag) or elsewhere(flag.lstrip("-"))
    named = f"here it is {' or '.join(here)}, and " if here else ""
    said = f"plait train has no {flag}; {named}values are written KEY=VALUE, such as train.steps=100"
    return PlaitError(f"{said}; `plait train --help` lists all keys").at(flag, fits=here or "KEY=VALUE")
