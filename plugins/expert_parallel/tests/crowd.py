"""A mixture of experts that shares no line with the one that Plait ships: other names, biases in the experts, a bias in
the gate, no shared expert, a weight for every row instead of a product by groups, and a choice that may be fixed.

Shapes: B batch, T tokens, N rows, D width, X experts, F inner width, K experts a token.
"""

import torch
import torch.nn.functional as F
from torch import nn

from plait import ModelSpec
from plait.ops import Normal, ones

K = 2


class People(nn.Module):
    def __init__(self, experts, dim, inner):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, inner, dim))
        self.up_bias = nn.Parameter(torch.empty(experts, inner))
        self.down = nn.Parameter(torch.empty(experts, dim, inner))
        self.down_bias = nn.Parameter(torch.empty(experts, dim))

    def forward(self, rows, how_many):
        whose = torch.arange(len(how_many), device=rows.device)
        whose_N = whose.repeat_interleave(how_many, output_size=rows.shape[0])
        inner_NF = F.gelu(self.up_bias[whose_N] + torch.einsum("nfd,nd->nf", self.up[whose_N], rows))
        return self.down_bias[whose_N] + torch.einsum("ndf,nf->nd", self.down[whose_N], inner_NF)


class Crowd(nn.Module):
    """A branch. `only`: the experts (one a choice) that every token goes to, None: those that the gate likes best."""

    def __init__(self, experts, dim, inner, only):
        super().__init__()
        self.only = only
        self.gate = nn.Linear(dim, experts)
        self.people = People(experts, dim, inner)

    def forward(self, x_BTD):
        x_ND = x_BTD.flatten(0, 1)
        likes_NX = self.gate(x_ND).softmax(-1)
        chosen_NK = likes_NX.topk(K, dim=-1).indices
        if self.only is not None:
            chosen_NK = torch.tensor(self.only, device=x_BTD.device).expand_as(chosen_NK)
        asked_N = chosen_NK.flatten()
        order_N = asked_N.argsort(stable=True)
        how_many_X = F.one_hot(asked_N, likes_NX.shape[-1]).sum(0)
        answers = self.people(how_many=how_many_X, rows=x_ND[order_N // K])
        answers = torch.zeros_like(answers).index_copy(0, order_N, answers).unflatten(0, (-1, K))
        return (answers * likes_NX.gather(-1, chosen_NK)[..., None]).sum(1).view_as(x_BTD)


class Mix(nn.Module):
    """A branch that lets a token see what stands before it."""

    def __init__(self, dim, inner):
        super().__init__()
        self.read, self.write = nn.Linear(dim, inner, bias=False), nn.Linear(inner, dim, bias=False)

    def forward(self, x_BTD):
        y_BTF = torch.tanh(self.read(x_BTD))
        return self.write(y_BTF.cumsum(1) / y_BTF.shape[1])


class Cell(nn.Module):
    def __init__(self, experts, dim, inner, only):
        super().__init__()
        self.norm1, self.mix = nn.RMSNorm(dim, 1e-6), Mix(dim, inner)
        self.norm2, self.crowd = nn.RMSNorm(dim, 1e-6), Crowd(experts, dim, inner, only)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.mix(self.norm1(x_BTD))
        return x_BTD + self.crowd(self.norm2(x_BTD))


class Town(nn.Module):
    def __init__(self, experts=4, dim=24, inner=16, cells=2, only=None, vocab=64):
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.cells = nn.ModuleList(Cell(experts, dim, inner, only) for _ in range(cells))
        self.norm = nn.RMSNorm(dim, 1e-6)
        self.answer = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, positions=None):
        x_BTD = self.words(tokens)
        for cell in self.cells:
            x_BTD = cell(x_BTD)
        return self.answer(self.norm(x_BTD))

    def spec(self):
        return ModelSpec(
            axes={
                "words.weight": ("vocab", "embed"),
                "cells.*.norm*.weight": ("embed",),
                "cells.*.mix.read.weight": ("ffn", "embed"),
                "cells.*.mix.write.weight": ("embed", "ffn"),
                "cells.*.crowd.gate.weight": (None, "embed"),
                "cells.*.crowd.gate.bias": (None,),
                "cells.*.crowd.people.up": ("experts", "ffn", "embed"),
                "cells.*.crowd.people.up_bias": ("experts", "ffn"),
                "cells.*.crowd.people.down": ("experts", "embed", "ffn"),
                "cells.*.crowd.people.down_bias": ("experts", "embed"),
                "norm.weight": ("embed",),
                "answer.weight": ("vocab", "embed"),
            },
            blocks=("cells.*",),
            branches=("cells.*.mix", "cells.*.crowd"),
            init={
                "words.weight": Normal(1.0),
                "cells.*.norm*.weight": ones,
                "norm.weight": ones,
                "*.weight": Normal(0.2),
                "cells.*.*.*.*": Normal(0.2),
            },
        )
