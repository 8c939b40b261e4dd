"""Why a run cannot be planned, in one sentence that names the strategy or the model, and what it does."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from plait.contract.axes import MeshAxis, describe
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.strategies.blame import blamed
from plait.strategies.hooks import TRACE
from plait.system.errors import one_line

DEVICE = ("cuda", "nvidia driver", "hip", "nccl")  # what torch's errors say if a GPU is missing


def refuse_divided_layers(axes: Iterable[Any], owner: Mapping[str, str]) -> None:
    """Raises PlaitError if one of these axes and views of strategies divides the layers of the model: then a step is
    not put together of the pieces of one trace."""
    cut = [axis for axis in axes if isinstance(axis, MeshAxis) and axis.splits == "layers" and axis.degree > 1]
    if cut:
        raise PlaitError(
            f"a step is traced in pieces only if ranks have all layers, but there is {describe(cut, owner)}; use "
            "degree 1, or leave the strategy out"
        ).at(cut[0].name, cut[0].degree, fits=(1,))


@contextlib.contextmanager
def in_words(config: Config, strategies: Iterable[str] | None = None) -> Iterator[None]:
    """Turns an error inside into a PlaitError. config: of the planned run. strategies: names, if not the config's."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        if os.environ.get(TRACE):
            raise
        who = _who(error, config, config.strategy if strategies is None else strategies)
        raise PlaitError(f"{who}{_what(error)}; {TRACE}=1 shows where") from error


def _who(error: Exception, config: Config, strategies: Iterable[str]) -> str:
    """Names the strategy or model whose code raised the error: "cannot plan strategy 'x' (dist 1.0), which "."""
    if blamed(error):
        return "cannot plan this run: a hook "  # a note names it
    from plait.strategies.registry import described, installed

    plugins = installed()
    packages = {plugins[name].package: name for name in strategies if name in plugins}
    for package in reversed(_packages(error.__traceback__)):
        if package in packages:
            return f"cannot plan {described(packages[package])}, which "
    return f"cannot plan this run: model {config.model.get('_target_')}, or what runs in it, "


def _what(error: Exception) -> str:
    from plait.system.torch_internals.tracing import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    said = one_line(error)
    if isinstance(error, DataDependentOutputException):
        return (
            f"reads the value of a tensor, and tensors have no values in a plan; plait.read_values gives one ({said})"
        )
    if isinstance(error, DynamicOutputShapeException):
        return f"makes a tensor whose shape depends on values, and tensors have no values in a plan ({said})"
    if isinstance(error, UnsupportedOperatorException):
        return f"calls an operator that does not say what it returns for tensors without values ({said})"
    if ".numpy()" in said:
        return f"reads the values of a tensor, and tensors have no values in a plan ({said})"
    if any(word in said.lower() for word in DEVICE):
        return f"needs a real device, and a plan has none ({said})"
    return f"fails in a plan, in which tensors have shapes but no values ({said})"


def _packages(trace: TracebackType | None) -> list[str]:
    found = []
    while trace is not None:
        found.append(str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        trace = trace.tb_next
    return found
