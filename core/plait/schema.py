"""From plain nodes of YAML to typed, validated attrs objects, with errors that name the key."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from plait.errors import PlaitError, near_miss

T = TypeVar("T")


def typed(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of the attrs class `cls` from plain `values`; `where` is the node's key in error messages.

    Raises PlaitError for an unknown key (naming the near miss), a value of another type, one that a validator
    refuses, and a mandatory one that is missing.
    """
    try:
        node = OmegaConf.merge(_schema(cls), OmegaConf.create(dict(values)))
        missing = sorted(OmegaConf.missing_keys(node))
        if missing:
            raise PlaitError(f"{_join(where, missing[0])} must be given; it has no default")
        return OmegaConf.to_object(node)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        raise PlaitError(f"{where}: {_first_line(error)}") from error
    except ConfigKeyError as error:
        key = error.full_key or str(error.key)
        parent, _, last = key.rpartition(".")
        known = _keys(cls, parent)
        raise PlaitError(
            f"unknown key {_join(where, key)}; there are {', '.join(known)}{near_miss(last, known)}"
        ) from error
    except OmegaConfBaseException as error:
        raise PlaitError(f"{_join(where, error.full_key or '')}: {_first_line(error)}") from error
    except (TypeError, ValueError) as error:  # attrs validators
        node_key, said = _join(where, _refused(cls, node)), _first_line(error)
        field = re.match(r"'(\w+)' (.*)", said)  # how validators of attrs begin
        raise PlaitError(f"{node_key}.{field[1]} {field[2]}" if field else f"{node_key}: {said}") from error


def _refused(cls: Any, node: Any) -> str:
    """The key of the inner node that a validator refuses; empty where it is the outermost itself."""
    for field in attrs.fields(cls):
        if OmegaConf.is_dict(node[field.name]) and attrs.has(OmegaConf.get_type(node, field.name) or object):
            try:
                OmegaConf.to_object(node[field.name])
            except (TypeError, ValueError):
                return field.name
    return ""


def _schema(cls: Any) -> Any:
    """OmegaConf takes defaults that are made by a factory only from an instance."""
    complete = all(field.default is not attrs.NOTHING for field in attrs.fields(cls))
    return OmegaConf.structured(cls() if complete else cls)


def _join(where: str, key: str) -> str:
    return ".".join(part for part in (where, key) if part) or "configuration"


def _keys(cls: type, path: str) -> list[str]:
    node = _schema(cls)
    inner = OmegaConf.select(node, path) if path else node
    return [str(key) for key in inner] if inner is not None else []


def _first_line(error: Exception) -> str:
    """Validators of attrs raise with several arguments; only the first is a sentence."""
    lines = str(error.args[0] if error.args else error).splitlines()
    return lines[0] if lines else type(error).__name__
