"""The next token of a text: its logits in any layout, and the draw."""

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait import IGNORE, Applied, Batch, whole_tensor

LEAST = 64  # tokens of the shortest window


@attrs.frozen
class Draw:
    """How a token is drawn. temperature: 0 takes the most likely one. top_k: of so many most likely ones; None: all.
    top_p: of the most likely ones whose probabilities reach this sum. seed: the same seed draws the same text."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def token(self, logits: Tensor, text: int, place: int) -> int:
        """One token, from logits (V,) in float64. text, place: the numbers of the text and of the token in it, which
        with the seed determine the draw, whatever the layout."""
        if self.temperature == 0:
            return int(logits.argmax())
        chances, tokens = (logits / self.temperature).softmax(0).sort(descending=True, stable=True)
        chances, tokens = chances[: self.top_k], tokens[: self.top_k]
        before = chances.cumsum(0) - chances
        sums = (chances * (before < self.top_p * chances.sum())).cumsum(0)
        number = (self.seed * 1_000_003 + text) * 1_000_003 + place
        generator = torch.Generator().manual_seed(number % 2**63)
        drawn = torch.rand((), dtype=torch.float64, generator=generator) * sums[-1]
        return int(tokens[min(int((sums <= drawn).sum()), len(tokens) - 1)])


class NextToken:
    """Computes the whole text for each token: the one way that is exact in every layout, and without a cache.

    longest: tokens that the model sees at most. size: how many tokens there are; None: as many as logits.
    """

    def __init__(self, applied: Applied, longest: int, size: int | None) -> None:
        self._applied, self.longest, self._size = applied, longest, size
        self._step = 2 * dist.get_world_size()  # a window is divided along the sequence, at most in so many parts

    @torch.no_grad()
    def __call__(self, ids: Sequence[int], draw: Draw, text: int, place: int) -> int:
        """The token after `ids`, on all ranks, which call this together."""
        window = self.window(len(ids))
        tokens = torch.zeros(1, window, dtype=torch.int64)  # what stands behind, no token attends to
        tokens[0, : len(ids)] = torch.tensor(ids)
        labels = torch.full((1, window), IGNORE)
        labels[0, len(ids) - 1] = 0
        drawn: list[int] = []

        def draws(logits: Tensor, labels: Tensor) -> Tensor:
            at = (labels[0] != IGNORE).nonzero().flatten().tolist()
            for place_here in at:
                row = whole_tensor(logits[:, place_here]).flatten()[: self._size].to("cpu", torch.float64)
                drawn.append(draw.token(row, text, place))
            return torch.zeros((), device=labels.device)

        batch = self._applied.deal(Batch(tokens, labels)).to(self._applied.device)
        self._applied.forward_backward([batch], 1, draws)
        return self._agreed(drawn)

    def window(self, count: int) -> int:
        """The least half, quarter, ... of the longest window that holds so many tokens, and divides evenly."""
        size = self.longest
        while size % (2 * self._step) == 0 and size // 2 >= max(count, LEAST):
            size //= 2
        return size

    @staticmethod
    def _agreed(drawn: list[int]) -> int:
        """What the first of the ranks that have logits has drawn: others have another part of the model or the text."""
        own = torch.tensor(drawn or [-1])
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        return next(int(each) for each in every if each >= 0)
