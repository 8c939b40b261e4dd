"""Checks that a manifest has the form of one that a save writes; its digest cannot prove that."""

import os
from collections.abc import Mapping, Set
from typing import Any

from plait.checkpoint.pieces import PIECES

MOST = 2**63 - 1  # of a count


def flaw(body: Mapping[str, Any], keys: Set[str]) -> str | None:
    """What is wrong with the JSON object of a manifest, in words; None if a save could have written it.

    keys: the keys of a manifest.
    """
    if strange := body.keys() ^ keys:
        return f"it {'has the key' if min(strange) in body else 'lacks'} {min(strange)!r}"
    if not _is_count(body["step"]) or not _is_count(body["tokens"]):
        return "step and tokens must be whole numbers of 64 bits from 0 on"
    for key in ("config", "data", "versions", "parameters", "files"):
        if not isinstance(body[key], dict):
            return f"{key} must be an object"
    if not isinstance(body["config"].get("train", {}), dict):
        return "config.train must be an object"
    data = body["data"]
    for key, least in (("global_batch_size", 1), ("shares", 0), ("samples", 0)):
        if not _is_count(data.get(key, least), least):
            return f"data.{key} must be a whole number of 64 bits from {least} on"
    if data.get("metrics") is not None and not _is_seal(data["metrics"]):
        return "data.metrics must be a size and a digest"
    states = data.get("states", [])
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        return "data.states must be a list of objects"
    if states and len(states) != data.get("shares", len(states)):
        return f"data.states has {len(states)} entries for {data['shares']} shares"
    best = data.get("best")
    if best is not None and not (isinstance(best, dict) and _is_best(best)):
        return "data.best must be a loss, its step and a number of validations"
    replicas = data.get("replicas", {})
    if not isinstance(replicas, dict) or not all(
        _is_pair(each, str) and _is_count(each[1]) for each in replicas.values()
    ):
        return "data.replicas must hold a strategy and a number for each axis"
    for name, entry in body["parameters"].items():
        if not (_is_pair(entry, list) and isinstance(entry[1], str) and all(_is_count(size) for size in entry[0])):
            return f"parameters[{name!r}] must be a shape and a dtype"
    for name, entry in body["files"].items():
        if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            return f"files has {name!r}, which is not the name of a file in the folder"
        whole = _is_pair(entry, int) and entry[1] is None  # the digests of its pieces are in a file of their own
        if not _is_seal([entry[0], ""] if whole and name + PIECES in body["files"] else entry):
            return f"files[{name!r}] must be a size and a digest"
    return None


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= MOST


def _is_best(value: Mapping[str, Any]) -> bool:
    counts = _is_count(value.get("step")) and _is_count(value.get("waited"))
    return counts and value.keys() == {"loss", "step", "waited"} and isinstance(value["loss"], float)


def _is_seal(value: Any) -> bool:
    return _is_pair(value, int) and _is_count(value[0]) and isinstance(value[1], str)


def _is_pair(value: Any, first: type) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], first)
