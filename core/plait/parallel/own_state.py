"""What strategies and observers keep in a checkpoint for themselves, under names that nobody else may use."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.contract.errors import PlaitError
from plait.parallel.state import canonical, forget_loading, free_to_be_infinite, is_loaded, mark

OWN = ("strategy.", "observer.")
RESERVED = (*OWN, "replica.")

Ask = Callable[[], Mapping[str, Tensor] | None]


def is_own(key: str) -> bool:
    """Whether `key` is a strategy's or an observer's: other runs ignore it."""
    return key.startswith(OWN)


def own_entries(
    owner: str, asks: Iterable[Ask], parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """(entries that alias the tensors that `asks` return, function to call after loading into them).

    owner: "strategy.NAME" or "observer.NAME", with which their names begin. parameters: of this rank, by FQN. An entry
    with the name of one must be finite to be saved, as the parameter must.
    Raises PlaitError for two tensors of one name, and for a rank's share of a parameter as a plain tensor, which no
    other layout could load.
    """
    kind, _, name = owner.partition(".")
    who, asks = f"{kind} {name!r}", list(asks)
    live = _named(who, asks)
    entries = {key: tensor.detach() for key, tensor in live.items()}
    for key, entry in entries.items():
        param = parameters.get(key)
        if param is None:
            free_to_be_infinite(entry)
        elif isinstance(param, DTensor) and not isinstance(entry, DTensor) and _is_share(entry, param):
            raise PlaitError(
                f"{who} keeps {key!r} of shape {tuple(entry.shape)}, this rank's share of the parameter of that name, "
                "as a plain tensor: keep a DTensor, as torch.zeros_like(parameter) makes it"
            )
    _check_same(who, live, _named(who, asks))

    def after() -> None:
        _check_same(who, live, _named(who, asks))
        for key, tensor in live.items():
            if is_loaded(entries[key]):
                mark(tensor, False)
            else:
                forget_loading(tensor)

    return {f"{owner}.{key}": entry for key, entry in entries.items()}, after


def _check_same(who: str, live: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    for key, tensor in live.items():
        if again.get(key) is not tensor:
            raise PlaitError(
                f"{who} returned another tensor as {key!r} of its state than before, so what a checkpoint holds of it "
                "would be lost: return the same tensor at every call"
            )
        if tensor.is_meta:
            raise PlaitError(f"{who} keeps {key!r} on the meta device: its hook 'state' is called before it has values")


def _is_share(entry: Tensor, param: DTensor) -> bool:
    return entry.shape == param.to_local().shape != param.shape


def _named(who: str, asks: Iterable[Ask]) -> dict[str, Tensor]:
    """What all `asks` return, without what torch's wrappers added to names."""
    named: dict[str, Tensor] = {}
    for ask in asks:
        for key, tensor in (ask() or {}).items():
            if named.setdefault(canonical(key), tensor) is not tensor:
                raise PlaitError(f"{who} returned two tensors as {key!r} of its state: give each a name of its own")
    return named
