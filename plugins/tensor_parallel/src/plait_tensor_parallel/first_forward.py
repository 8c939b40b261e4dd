"""Says what is wrong if a model's first forward fails because a rank has only its share of the positions."""

import re
from typing import Any

from torch import nn

from plait import PlaitError, mix_in
from plait_tensor_parallel.stream import SEQUENCE, ResidualStream

# The first word of what libraries below torch say: no model's fault, and often plain RuntimeErrors.
LIBRARY = re.compile(r"\b(cuda|cu(blas|dnn|fft|rand|solver|sparse)|hip|[nr]ccl|nvml|nvshmem|gloo|symm_?mem)", re.I)


def explain_first(model: nn.Module, stream: ResidualStream) -> None:
    """Let `model` raise PlaitError if torch cannot do what its first forward does outside of branches."""
    mix_in(model, FirstForward)
    model.__dict__["_first_on"] = stream


class FirstForward:
    """Mixed into the class of a model."""

    _first_on: ResidualStream | None  # None after the first forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        stream = self._first_on
        try:
            result = plain.__call__(*args, **kwargs)
        except RuntimeError as error:
            if stream is None:
                raise
            outside = stream.last and not stream.inside and not stream.ended
            said = (str(error).splitlines() or [""])[0]
            if not outside or type(error) is not RuntimeError or LIBRARY.search(said):  # out of memory is another type
                raise
            raise PlaitError(
                f"the model's forward fails after {stream.last!r}, outside branches: {said}; with {SEQUENCE}=true a "
                "rank has its share of the positions there, so what meets the stream must be what a module returns; "
                f"{SEQUENCE}=false gives each rank all of them"
            ).at(SEQUENCE, True, fits=(False,)) from error
        self.__dict__["_first_on"] = None
        return result
