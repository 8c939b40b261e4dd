"""Why a run cannot be planned, in one sentence that names the strategy or the model, and what it does."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from types import TracebackType

from plait import Config, MeshLayout, PlaitError
from plait.host import one_line, plugins

TRACE = "PLAIT_TRACE_PLUGINS"  # set, it shows the calls of hooks, and errors where they come from
DEVICE = ("cuda", "nvidia driver", "hip", "nccl")  # what torch's errors say if a GPU is missing


def refuse_divided_layers(layout: MeshLayout) -> None:
    """Raises PlaitError if an axis divides the layers of the model: then a step is not put together of the pieces of
    one trace."""
    cut = [axis for axis in layout.dense if axis.splits == "layers" and axis.degree > 1]
    if cut:
        raise PlaitError(
            f"a step is traced in pieces only if ranks have all layers, but there is {layout.describe(cut)}; use "
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
    if plugins.blamed(error):
        return "cannot plan this run: a hook "  # a note names it
    installed = plugins.installed()
    packages = {installed[name].package: name for name in strategies if name in installed}
    for package in reversed(_packages(error.__traceback__)):
        if package in packages:
            return f"cannot plan {plugins.described(packages[package])}, which "
    return f"cannot plan this run: model {config.model.get('_target_')}, or what runs in it, "


def _what(error: Exception) -> str:
    from plait_plan.torch_internals import (
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
