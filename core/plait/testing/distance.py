"""How far a strategy whose numerics are its own says that it is from exact training."""

from plait.contract.errors import PlaitError
from plait.strategies.order import traits
from plait.strategies.registry import described, load

UNDECLARED = 0.25  # of a strategy that says nothing
FURTHEST = 0.4  # a gradient that is halved is off by 0.5


def is_own(name: str) -> bool:
    """Whether the mathematics of this strategy differ on purpose."""
    return traits(name, load(name)).numerics == "own"


def declared_distance(name: str) -> float | None:
    """What its class declares: how far a gradient may be from that of exact training, as a part of it.

    Raises PlaitError unless it is a number in which a factor of 2 cannot hide, beside numerics of its own.
    """
    far = getattr(load(name), "distance", None)
    if far is not None and (type(far) not in (int, float) or not 0 < far <= FURTHEST or not is_own(name)):
        fits = f"above 0 and at most {FURTHEST}, beside numerics = 'own'"
        raise PlaitError(f"{described(name)} has distance = {far!r}, which must be {fits}").at(
            "distance", far, fits=fits
        )
    return far


def distance(name: str) -> float:
    """The same, or what counts if it declares none."""
    far = declared_distance(name)
    return UNDECLARED if far is None else far
