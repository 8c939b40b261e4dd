"""The folders `conf` of installed packages, and which of their options have the same name."""

from importlib.util import find_spec
from pathlib import Path

import attrs

from plait.contract.kinds import KINDS
from plait.strategies.entry_points import entry_points


@attrs.frozen
class Shipped:
    """A folder of options, as GROUP/OPTION.yaml, and the distribution that ships it."""

    distribution: str
    conf: Path


def shipped() -> list[Shipped]:
    """The folders of packages of plugins that a config chooses, sorted by package. Imports none of them."""
    packages: dict[str, str] = {}
    for entry in entry_points(*(kind.group for kind in KINDS.values() if kind.choice)):
        packages.setdefault(entry.package, entry.distribution)
    packages.pop("plait", None)  # its own folder is Hydra's first
    return [
        Shipped(packages[package], Path(location) / "conf")
        for package in sorted(packages)
        for location in _locations(package)
    ]


def _locations(package: str) -> list[str]:
    """Where a package lies. pkg:// in Hydra's path would import it, and most of them are not used."""
    try:
        spec = find_spec(package)
    except Exception:  # __main__ has no spec; finders of editable packages are anybody's code
        return []
    return list((spec and spec.submodule_search_locations) or ())


def defined_twice(option: str, places: list[tuple[str, str]]) -> str:
    """The sentence about an option of several packages. option: GROUP/OPTION. places: (distribution, file)."""
    group, _, name = option.rpartition("/")
    by = " and ".join(f"by {distribution} ({file})" for distribution, file in places)
    by_name = any(kind.node for kind in KINDS.values() if kind.choice == group)
    own = "" if by_name else f", or copy the one to use to ./conf/{option}.yaml"
    return f"{group}={name} is defined twice: {by}; uninstall one{own}"


def collisions(own: Path) -> list[str]:
    """A sentence for each option that several packages ship, Plait's `own` folder included."""
    files: dict[str, dict[Path, str]] = {}
    for each in (Shipped("plait", own), *shipped()):
        for file in sorted(each.conf.glob("*/**/*.yaml")):
            option = file.relative_to(each.conf).with_suffix("").as_posix()
            files.setdefault(option, {}).setdefault(file.resolve(), each.distribution)
    return [
        defined_twice(option, [(distribution, str(file)) for file, distribution in places.items()])
        for option, places in sorted(files.items())
        if len(places) > 1
    ]
