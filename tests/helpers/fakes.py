"""Distributions that pip never saw: a folder on `sys.path` with what an installed strategy leaves there."""

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

STRATEGY = """
import attrs
from plait import MeshAxis, hookimpl

@attrs.define
class Ghost:
    degree: int = 1

    @hookimpl
    def build_mesh(self):
        return [MeshAxis("ghost", self.degree)]
"""


def distribution(
    folder: Path,
    name: str,
    strategies: Mapping[str, str] | None = None,
    *,
    api: str | None = "v1",
    version: str = "1.0",
    code: str = STRATEGY,
) -> None:
    """Write the distribution `name`, with a package of that name that holds `code`, into `folder`.

    strategies: strategy -> class in that package; by default one, "ghost", of class Ghost. Each has an options file.
    """
    package = name.replace("-", "_")
    strategies = strategies or {"ghost": "Ghost"}
    conf = folder / package / "conf" / "strategy"
    conf.mkdir(parents=True)
    (folder / package / "__init__.py").write_text(textwrap.dedent(code))
    for each in (conf, conf.parent):
        (each / "__init__.py").touch()
    for strategy in strategies:
        (conf / f"{strategy}.yaml").write_text(f"# @package strategy.{strategy}\n")
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = ["[plait.strategies]", *(f"{strategy} = {package}:{cls}" for strategy, cls in strategies.items())]
    if api is not None:
        lines += ["[plait.api]", *(f"{strategy} = {api}" for strategy in strategies)]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def forget(folder: Path) -> None:
    """As if nothing had been imported from `folder`; the next test writes other code under the same name."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
