"""Puts the configs of the user's folder and of every installed package of strategies or models on Hydra's path."""

import os
from importlib.util import find_spec

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class PlaitSearchPath(SearchPathPlugin):
    """Hydra loads this in every application of the environment, so it stands aside in those that are not Plait's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not any(entry.provider == "main" and entry.path == "pkg://plait.conf" for entry in search_path.get_path()):
            return
        from plait.strategies.registry import packages

        if os.path.isdir("conf"):
            search_path.append("./conf", f"file://{os.path.abspath('conf')}")
        for package in packages():
            spec = find_spec(package)  # pkg:// would import it, and most of them are not used
            for location in (spec and spec.submodule_search_locations) or ():
                search_path.append(package, f"file://{location}/conf")
