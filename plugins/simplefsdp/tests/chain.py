"""A model without attention, which is compiled in a fraction of the time of one with it."""

import torch.nn.functional as F
from torch import nn

from plait import ModelSpec
from plait.ops import Normal
from plait_testing.models import VOCAB

BLOCKS = 2


class Block(nn.Module):
    def __init__(self, inner=48):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, inner), nn.Linear(inner, 32, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    def __init__(self, inner=48, vocab=VOCAB):
        super().__init__()
        self.words, self.head = nn.Embedding(vocab, 32), nn.Linear(32, vocab, bias=False)
        self.steps = nn.ModuleList(Block(inner) for _ in range(BLOCKS))

    def forward(self, tokens, positions=None):
        x = self.words(tokens)
        for step in self.steps:
            x = step(x)
        return self.head(x)

    def spec(self):
        return ModelSpec(
            axes={
                "words.weight": ("vocab", "embed"),
                "steps.*.norm.weight": ("embed",),
                "steps.*.up.weight": ("ffn", "embed"),
                "steps.*.up.bias": ("ffn",),
                "steps.*.down.weight": ("embed", "ffn"),
                "head.weight": ("vocab", "embed"),
            },
            blocks=("steps.*",),
            init={"*.*": Normal(0.02), "*.*.*.*": Normal(0.02)},
        )
