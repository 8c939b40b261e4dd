"""What the ranks of a run hold together: some may hold other entries than others, such as stages of a model."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from plait.contract.errors import PlaitError

T = TypeVar("T")
AllRanks = Callable[[Callable[[], Any]], list[Any]]  # runs a function on each rank, returns all answers on each


def merged(own: Mapping[str, T], all_ranks: AllRanks, known: Collection[str] = ()) -> tuple[dict[str, T], bool]:
    """(the entries of all ranks by name, whether all ranks have the same names). Called by all ranks.

    Of several ranks with a name the entry of the lowest counts. If all have the same names, as in most runs, entries
    are not sent, and each rank gets its own. known: names that must be among them, in the order of the result.
    Raises PlaitError, on all ranks, if no rank has one of `known`.
    """
    digest = hashlib.sha256("\0".join(own).encode()).hexdigest()
    digests = all_ranks(lambda: digest)
    found, alike = dict(own), len(set(digests)) == 1
    if not alike:
        answers = all_ranks(lambda: (digest, dict(own)))
        found, seen = {}, set[str]()
        for other, entries in answers:
            if other not in seen:
                found |= {name: entry for name, entry in entries.items() if name not in found}
            seen.add(other)
    if missing := [name for name in known if name not in found]:
        raise PlaitError(
            f"no rank holds {missing[0]!r}{f' and {len(missing) - 1} more' if missing[1:] else ''}, which the model has"
        )
    return {name: found[name] for name in dict.fromkeys((*known, *found))}, alike
