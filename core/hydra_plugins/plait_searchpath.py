"""Puts the configs of the user's folder and of every installed package of strategies or models on Hydra's path."""

import os

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class PlaitSearchPath(SearchPathPlugin):
    """Hydra loads this in every application of the environment, so it stands aside in those that are not Plait's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not any(entry.provider == "main" and entry.path == "pkg://plait.conf" for entry in search_path.get_path()):
            return
        from plait.strategies.shipped import shipped

        if os.path.isdir("conf"):
            search_path.append("./conf", f"file://{os.path.abspath('conf')}")
        for each in shipped():
            search_path.append(each.distribution, f"file://{each.conf}")
