"""What a rank was dealt of the batch that its model gets next."""

import attrs


@attrs.define
class DealtTokens:
    """count: of a sequence's tokens. documents: whether they came with positions: a row may then hold several."""

    count: int = 0
    documents: bool = False
