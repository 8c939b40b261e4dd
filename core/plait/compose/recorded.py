"""The config of a run that there is, under further overrides."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from plait.compose.compose import composed, config_of
from plait.compose.loader import Loader
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.contract.kinds import KINDS

NAME = "recorded"  # of the file that holds the run's config, in the group of recipes
TOKENIZER = ("tokenizer", "eod_token", "bod_token")  # of a run's data; other data are read with the same


def recompose(recorded: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """The config of the run that `recorded` is of, in plain values, changed by overrides as for `plait train`.

    What an override chooses, such as `data=text`, takes the place of what the run has there; only the run's tokenizer
    stays. Raises PlaitError as `compose` does.
    """
    chosen = {re.split("[=@]", each.lstrip("+~"))[0] for each in overrides}
    kept = {name: dict(value) if isinstance(value, Mapping) else value for name, value in recorded.items()}
    for name in chosen & {"model", "data", "optimizer", "strategy", "observer", "sink", "cluster"}:
        kept.pop(name, None)
    for node, _, field in (kind.node.partition(".") for kind in KINDS.values() if "." in kind.node):
        if node in chosen and node in kept:
            kept[node].pop(field, None)
    absent = [f"~{name}" for name in ("model", "data", "optimizer") if name not in chosen]
    caught: list[Config] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recipe", f"{NAME}.yaml")
        file.parent.mkdir()
        file.write_text("# @package _global_\n" + yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")

        def loader(config_search_path: Any) -> Loader:  # Hydra gives it by its name
            config_search_path.prepend(NAME, f"file://{folder}")
            return Loader(config_search_path)

        own = [*absent, f"+recipe={NAME}"]
        try:
            composed(lambda made: caught.append(config_of(made)), [*own, *overrides], loader)
        except PlaitError as error:
            error.args = (str(error).replace(f"(from {' '.join(own)} ", "(from "),)
            raise
    config, before = caught[-1], recorded.get("data") or {}
    for key in TOKENIZER if "data" in chosen and "data.tokenizer" not in chosen else ():
        if key in config.data and before.get(key) is not None:
            config = config.with_value(f"data.{key}", before[key])
    return config
