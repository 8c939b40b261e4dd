"""Whether the installed `datasets` keeps its place in a stream."""

from functools import cache
from itertools import islice

from plait import PlaitError

ROWS, TAKEN = 12, 4


@cache
def check_place_kept() -> None:
    """Raises PlaitError if a stream that is resumed twice begins again (datasets 5.0.0: huggingface/datasets 8308).

    Shown by a small stream rather than by the version, because a bug may come back. Takes milliseconds.
    """
    import datasets

    number, state = [], None
    for _ in range(ROWS // TAKEN):
        rows = datasets.Dataset.from_dict({"number": list(range(ROWS))}).to_iterable_dataset(num_shards=2)
        if state is not None:
            rows.load_state_dict(state)
        number += [row["number"] for row in islice(rows, TAKEN)]
        state = rows.state_dict()
    if number != list(range(ROWS)):
        raise PlaitError(
            f"data=hf: datasets {datasets.__version__} loses its place in a stream: a run that is resumed twice would "
            "read it from the start again; pip install 'datasets>=5.0.1'"
        ).at("data", "hf", fits="another version of datasets")
