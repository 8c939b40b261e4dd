"""What a rank was dealt of the batch that its model gets next."""

import attrs


@attrs.define
class Dealt:
    """tokens: of a sequence. documents: whether they came with positions, so that a row may hold several documents."""

    tokens: int = 0
    documents: bool = False
