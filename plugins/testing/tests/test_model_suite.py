"""The suite of models passes the model of docs/models.md, and names each bug that is planted in it."""

from typing import Any

import pytest
import torch

from plait.testing import ModelSuite
from tests.docs.pages import ROOT, blocks

CODE = next(block.text for block in blocks(ROOT / "docs" / "models.md") if block.text.startswith("# tiny.py"))
SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "ffn_dim": 48, "vocab_size": 64, "max_seq_len": 16}
LAST, MLP = "        return self.head(self.norm(x_BTD))", "return self.down(F.gelu(self.up(x_BTD)))"
HEAD = "self.head = nn.Linear(dim, vocab_size, bias=False)\n"

BUGS = {  # what is wrong: (the test that fails, what stands in the model, what takes its place, how it fails)
    "flops of what is looked up": (
        "operations_per_token", "- looked_up", "", "`flops` says .* the products are",
    ),
    "flops without attention": ("operations_per_token", "+ attention * seq_len", "", "at 8 tokens `flops` says"),
    "a head that only looks tied": (
        "tied_parameters_are_one", HEAD, HEAD + "        self.head.weight = nn.Parameter(self.tokens.weight.data)\n",
        r"head.weight and tokens.weight are 2 parameters",
    ),
    "a dead parameter": (
        "a_gradient_reaches_every_parameter", "self.inner = Inner()",
        "self.inner, self.gate = Inner(), nn.Linear(dim, dim, bias=False)",
        r"is zero of blocks.0.attention.gate.weight, blocks.1",
    ),
    "a part of forward without gradient": (
        "gradients_equal_finite_differences", MLP, MLP.replace("up(x_BTD)", "up(x_BTD.detach())"),
        "along a way on which the loss changes by",
    ),
    "positions ignored": (
        "positions_count_from_zero_and_are_read", " if positions is None else positions\n        x", "\n        x",
        "ignores how far apart",
    ),
    "documents ignored": (
        "packed_documents_are_separate", "if positions is None:\n            return", "if True:\n            return",
        "do not give the logits of each alone",
    ),
    "a token sees what comes": ("no_token_sees_a_later_one", "is_causal=True", "is_causal=False", "token 8 changes"),
    "a buffer without a line": (
        "the_spec_names_every_parameter_and_buffer", "self.inner = Inner()",
        'self.inner = Inner()\n        self.register_buffer("scale", torch.ones(1))',
        r"does not name blocks.0.attention.scale in `init`",
    ),
    "a pattern of nothing": (
        "every_pattern_of_the_spec_is_used", '"norm.weight": ("embed",)', '"norm.*": ("embed",), "ln": ()',
        "'ln' in `axes`",
    ),
    "an init that leaves a parameter": (
        "initial_values_cover_everything", "tensor.fill_(1.0)", "return", "`init` leaves out blocks.0.norm1.weight",
    ),
    "an init by torch's own seed": (
        "initial_values_follow_from_the_seed", ", generator=generator)", ")", "with the same seed tokens.weight",
    ),
    "blocks in another order": (
        "modules_run_once_and_in_order", "in self.blocks:", "in reversed(self.blocks):",
        "blocks.2', 'blocks.1', 'blocks.0",
    ),
    "a block that reads a second stream": (
        "stages_make_the_whole", "x_BTD = block(x_BTD, positions)",
        "x_BTD = block(x_BTD, positions) + self.places(places.expand_as(tokens))",
        "cut before block 1",
    ),
    "the embedding's rows read apart": (
        "modules_run_once_and_in_order", LAST, LAST + " + self.tokens.weight.sum()", "is read outside of its module",
    ),
    "a count of heads in a view": (
        "shares_of_a_branch_sum_to_the_whole[2]", "unflatten(-1, (-1, self.head_dim))", "unflatten(-1, (4, -1))",
        "shares of the branch 'blocks.0.attention' do not sum",
    ),
    "a norm behind a branch": (
        "shares_of_a_branch_sum_to_the_whole[2]", MLP, f"return F.rms_norm({MLP[7:]}, (32,))", "branch 'blocks.0.mlp'",
    ),
    "a module without a field": (
        "before_and_after_hold_what_blocks_do_not", 'before=["tokens", "places"]', 'before=["tokens"]', "places.weight",
    ),
    "logits that are not the head's": (
        "the_loss_by_chunks_is_the_loss", LAST, LAST + " * 0.5", "returns its head's result",
    ),
    "logits in float32": ("dtypes_agree[bfloat16]", LAST, LAST + ".float()", "logits in torch.float32"),
    "a block that breaks its graph": (
        "blocks_are_captured_whole", "x_BTD = x_BTD + self.att",
        "x_BTD = x_BTD if x_BTD.sum() > 0 else 2 * x_BTD\n        x_BTD = x_BTD + self.att", "Data-dependent branching",
    ),
    "a model that breaks its graph before all else": (
        "the_whole_model_is_one_graph", "        places = torch.arange",
        "        print()\n        places = torch.arange", "print",
    ),
    "a block that knows its number": (
        "blocks_are_captured_whole", "for block in self.blocks:",
        "for i, block in enumerate(self.blocks):\n            block.norm2.eps = i / 1e5",
        "3 blocks of 1 structures are 3 graphs",
    ),
}  # fmt: skip


def suite_of(code: str, **fields: Any) -> Any:
    space: dict[str, Any] = {}
    exec(code, space)

    class Suite(ModelSuite):
        def build(self) -> torch.nn.Module:
            with torch.device("meta"):
                return space["Tiny"](**SIZES)

    for name, value in fields.items():
        setattr(Suite, name, value)
    return Suite()


class TestTheModelOfThePage(ModelSuite):
    build = suite_of(CODE).build


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_named(bug: str) -> None:
    test, old, new, says = BUGS[bug]
    assert CODE.count(old) == 1
    name, _, argument = test.partition("[")
    suite = suite_of(CODE.replace(old, new), ties=(("head.weight", "tokens.weight"),) if "tied" in test else ())
    arguments = [int(argument[:-1]) if argument[:-1].isdigit() else argument[:-1]] if argument else []
    with pytest.raises(Exception, match=says):
        getattr(suite, f"test_{name}")(*arguments)
