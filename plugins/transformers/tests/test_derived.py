"""What is derived from a family: axes, attention, initial values, refusals to divide."""

import attrs
import pytest
import torch
from families import built, keys_of

from plait import Packed, UnequalParts, transform_param
from plait.testing import raises_about
from plait_transformers import attention, branch, called, derived, proof, supposed
from plait_transformers.build import decoder
from plait_transformers.watch import watching

pytestmark = pytest.mark.usefixtures("fresh")

PARTS = Packed("ffn", 2)
LLAMA = {
    "model.embed_tokens.weight": ("vocab", "embed"),
    "model.layers.*.self_attn.q_proj.weight": ("heads", "embed"),
    "model.layers.*.self_attn.k_proj.weight": ("kv_heads", "embed"),
    "model.layers.*.self_attn.v_proj.weight": ("kv_heads", "embed"),
    "model.layers.*.self_attn.o_proj.weight": ("embed", "heads"),
    "model.layers.*.mlp.gate_proj.weight": ("ffn", "embed"),
    "model.layers.*.mlp.up_proj.weight": ("ffn", "embed"),
    "model.layers.*.mlp.down_proj.weight": ("embed", "ffn"),
    "model.layers.*.input_layernorm.weight": ("embed",),
    "model.layers.*.post_attention_layernorm.weight": ("embed",),
    "model.norm.weight": ("embed",),
    "lm_head.weight": ("vocab", "embed"),
}


def test_the_spec_of_llama():
    spec = built("llama").spec()
    assert dict(spec.axes) == LLAMA
    assert spec.sizes == {"heads": 4, "kv_heads": 2}
    assert (spec.blocks, spec.head) == (("model.layers.*",), "lm_head")
    assert (spec.before, spec.after) == (("model.embed_tokens",), ("model.norm", "lm_head"))
    assert spec.branches == ("model.layers.*.self_attn", "model.layers.*.mlp")
    assert spec.attention == "model.layers.*.self_attn.inner"


def test_any_size_is_described_on_meta():
    sizes = {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = decoder(config={"model_type": "llama", **sizes, "intermediate_size": 53248, "vocab_size": 128256})
    spec = model.spec()
    assert sum(p.numel() for p in model.parameters()) == 405_853_388_800
    assert spec.sizes == {"heads": 128, "kv_heads": 8}
    assert spec.flops(8192) / 1e9 == pytest.approx(2625, rel=0.01)


def test_a_language_part_is_built_once_for_its_small_copy(monkeypatch):
    sizes, shrunken = list[int](), proof.shrunken
    monkeypatch.setattr(proof, "shrunken", lambda config, model: sizes.append(1) or shrunken(config, model))
    for cached in (proof._facts, proof.small_config, proof._check_text_alone):
        cached.cache_clear()
    built("gemma3")
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("kind", "part", "why"),
    [
        ("codegen", "transformer.h.*.attn", "half of it fails"),
        ("trocr", "model.decoder.layers.*.self_attn", "half of it fails"),
        ("jetmoe", "model.layers.*.mlp", "not those of attention or of a feed-forward"),
        ("axk1", "model.layers.*.mlp", "do not add up"),
    ],
)
def test_what_does_not_divide_stays_whole(kind, part, why):
    model = built(kind)
    assert why in model.facts.whole[part]
    inside = {axis for name, axes in model.spec().axes.items() if name.startswith(part) for axis in axes}
    assert inside <= {None, "embed", "experts"}  # experts are divided by another strategy


QKV = UnequalParts((("heads", 8), ("kv_heads", 8), ("kv_heads", 8)))
FUSED = {  # family, part of a block -> axes of its parameters
    ("phi3", "mlp"): {"gate_up_proj.weight": (PARTS, "embed"), "down_proj.weight": ("embed", "ffn")},
    ("phi3", "self_attn"): {"qkv_proj.weight": (QKV, "embed"), "o_proj.weight": ("embed", "heads")},
    ("qwen3_next", "self_attn"): {
        "q_proj.weight": ("heads", "embed"),
        "k_proj.weight": ("kv_heads", "embed"),
        "v_proj.weight": ("kv_heads", "embed"),
        "o_proj.weight": ("embed", "heads"),
        "q_norm.weight": (None,),
        "k_norm.weight": (None,),
    },
    ("gpt_neox", "attention"): {
        "query_key_value.weight": ("heads", "embed"),
        "query_key_value.bias": ("heads",),
        "dense.weight": ("embed", "heads"),
        "dense.bias": ("embed",),
    },
    ("deepseek_v3", "self_attn"): {
        "q_a_proj.weight": (None, "embed"),
        "q_a_layernorm.weight": (None,),
        "q_b_proj.weight": ("heads", None),
        "kv_a_proj_with_mqa.weight": (None, "embed"),
        "kv_a_layernorm.weight": (None,),
        "kv_b_proj.weight": ("heads", None),
        "o_proj.weight": ("embed", "heads"),
    },
    ("qwen2_moe", "mlp"): {
        "gate.weight": (None, "embed"),
        "experts.gate_up_proj": ("experts", PARTS, "embed"),
        "experts.down_proj": ("experts", "embed", "ffn"),
        "shared_expert.gate_proj.weight": ("ffn", "embed"),
        "shared_expert.up_proj.weight": ("ffn", "embed"),
        "shared_expert.down_proj.weight": ("embed", "ffn"),
        "shared_expert_gate.weight": (None, "embed"),
    },
}


@pytest.mark.parametrize(("kind", "part"), FUSED)
def test_matrices_with_parts_and_behind_low_ranks_are_divided(kind, part):
    spec = built(kind).spec()
    found = {name.partition(f".{part}.")[2]: axes for name, axes in spec.axes.items() if f".{part}." in name}
    assert found == FUSED[kind, part]
    assert spec.sizes.get("heads", 4) == 4


HALVES = {  # family -> what reads the stream -> the matrix that writes to it
    "bert": {"attention.self": "attention.output.dense", "intermediate.dense": "output.dense"},
    "bart": {"fc1": "fc2"},
    "ctrl": {"ffn.0": "ffn.2"},  # and its attention, whose matrices no module holds without the last
}


@pytest.mark.parametrize("kind", HALVES)
def test_what_writes_to_the_stream_may_be_another_module(kind):
    spec = built(kind).spec()
    block = spec.blocks[0]
    assert spec.writers == {f"{block}.{reader}": f"{block}.{writer}" for reader, writer in HALVES[kind].items()}
    assert {*spec.writers, *spec.writers.values()} <= {*spec.branches}
    for reader, writer in HALVES[kind].items():
        axis = "heads" if "attention" in reader else "ffn"
        assert spec.axes_of(f"{block}.{writer}.weight".replace("*", "1")) == ("embed", axis)
        assert any(axes == (axis, "embed") for n, axes in spec.axes.items() if n.startswith(f"{block}.{reader}"))
    assert "heads" in {axis for axes in spec.axes.values() for axis in axes}


def test_the_biases_of_transposed_matrices_are_told_to_strategies():
    spec = built("gpt2").spec()
    assert spec.biases == ("transformer.h.*.attn.c_proj.bias", "transformer.h.*.mlp.c_proj.bias")
    assert spec.axes_of("transformer.h.1.attn.c_attn.weight") == ("embed", Packed("heads", 3))
    assert spec.axes_of("transformer.h.1.mlp.c_proj.weight") == ("ffn", "embed")
    assert built("gpt_oss").spec().biases == ("model.layers.*.mlp.experts.down_proj_bias",)
    assert built("bert").spec().biases == ()


def test_norms_over_all_heads_and_sinks_are_told_to_strategies():
    across = built("olmo2").spec().across
    assert across == {f"model.layers.*.self_attn.{n}_norm": a for n, a in (("q", "heads"), ("k", "kv_heads"))}
    spec = built("gpt_oss").spec()
    assert spec.axes_of("model.layers.0.self_attn.sinks") == ("heads",)
    assert spec.elementwise == ("model.layers.*.self_attn.sinks",)


def test_what_counts_heads_follows_its_matrix():
    model = built("stablelm")
    attention = model.model.layers[1].self_attn
    assert (attention.num_heads, attention.num_key_value_heads) == (4, 2)
    attention.q_proj.weight = torch.nn.Parameter(torch.empty(16, 32, device="meta"))
    attention.k_proj.weight = torch.nn.Parameter(torch.empty(8, 32, device="meta"))
    attention.q_proj(torch.empty(1, 3, 32, device="meta"))
    attention.k_proj(torch.empty(1, 3, 32, device="meta"))
    assert (attention.num_heads, attention.num_key_value_heads) == (2, 1)
    assert model.model.layers[0].self_attn.num_heads == 4


def test_layers_may_differ_in_the_width_of_heads_but_not_in_key_heads():
    """Gemma 4: with one key head in some layers and two in others, no number of key heads is right for all."""
    spec = built("gemma4_text").spec()
    assert (spec.sizes, spec.attention) == ({"heads": 4, "kv_heads": 2}, None)
    keys = {"attention_k_eq_v": True, "per_layer_config": {1: {"head_dim": 16, "num_key_value_heads": 1}}}
    model = built("gemma4_text", **keys)
    assert model.facts.whole == {"model.layers.*.self_attn": "its layers differ in the number of key heads"}
    assert not {"heads", "kv_heads"} & {axis for axes in model.spec().axes.values() for axis in axes}


@pytest.mark.parametrize("kind", ["gemma2", "mistral", "granite", "gpt_oss"])
def test_attention_is_offered_to_strategies(kind):
    """A scale, a window, a cap or sinks reach a strategy in the inner module's place as keywords."""
    assert built(kind).spec().attention == "model.layers.*.self_attn.inner"


def test_initial_values_are_the_family_s_own():
    gpt2 = built("gpt2", initializer_range=0.1).spec()
    assert gpt2.init_of("transformer.h.1.mlp.c_proj.weight").std == pytest.approx(0.1 / 2)  # 0.1 / (2 * layers)^0.5
    assert gpt2.init_of("transformer.h.1.mlp.c_fc.weight").std == pytest.approx(0.1)
    llama = built("llama")
    angles = torch.empty(4)
    llama.spec().init_of("model.rotary_emb.inv_freq")(angles, None)
    assert torch.allclose(angles, 10000.0 ** (-torch.arange(0, 8, 2) / 8))
    table = built("gemma", pad_token_id=5).spec().init_of("model.embed_tokens.weight")
    row = torch.ones(3)
    assert not table(row, torch.Generator(), row=5).any()
    assert table(row, torch.Generator(), row=4).all()


PLANTED = {"window": "mistral", "softcap": "gemma2", "positions": "llama", "causal": "llama"}


@pytest.mark.parametrize("fault", PLANTED)
def test_attention_that_is_wrong_is_not_used(fault, monkeypatch):
    """The family's own is used instead; wrong masks of packed documents are seen, and these are refused."""
    forward = attention.Inner.forward

    def broken(self, q, k, v, positions=None, **more):
        if fault == "causal":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        more.pop(fault, None)
        return forward(self, q, k, v, None if fault == "positions" else positions, **more)

    monkeypatch.setattr(attention.Inner, "forward", broken)
    model = built(PLANTED[fault])
    facts = model.facts
    if fault == "positions":
        assert facts.why_no_documents
        with raises_about("data.attention", "document", "across"), torch.device("meta"):
            model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
    else:
        assert (facts.how, model.spec().attention) == (attention.OWN, None)
        assert model.spec().mixers == ("model.layers.*.self_attn",)


def test_a_recurrence_is_told_to_strategies():
    """A gated delta rule in one layer, attention in the other; the rule reads the convolution's weight."""
    model = built("olmo_hybrid")
    facts, spec = model.facts, model.spec()
    assert spec.mixers == ("model.layers.*.linear_attn",)
    assert spec.attention == "model.layers.*.self_attn.inner"
    assert facts.why_no_documents == ""
    assert facts.lent == (("model.layers.*.linear_attn", "model.layers.*.linear_attn.conv1d"),)
    assert "model.layers.*.linear_attn" not in facts.whole


def test_what_a_block_reads_of_modules_inside_is_told_and_lent():
    """Gemma 3n: in training, a method that is no forward computes with a weight of a module inside."""
    model = built("gemma3n_text")
    owner = "model.layers.*.altup.correction_coefs"
    assert model.facts.lent == (("model.layers.*", owner),)
    for block in model.model.layers:
        assert block.owners == (block.altup.correction_coefs,)
    seen, inner = list[torch.Tensor](), model.model.layers[1].altup.correction_coefs
    transform_param(inner, "weight", lambda weight: seen.append(weight) or weight)
    model.train()(torch.zeros(1, 4, dtype=torch.int64, device="meta"))
    assert [each is inner._parameters["weight"] for each in seen] == [True]


def test_a_model_inside_fills_its_own_values():
    """Of Gemma 3n, the model of the blocks alone knows the width that its scale is made of."""
    fill = built("gemma3n_text").spec().init_of("model.per_layer_projection_scale")
    assert fill(torch.empty(()), None).item() == pytest.approx(32**-0.5)


def test_a_family_without_heads_is_described():
    """Mamba, a recurrence alone; its rates are computed from whole numbers, also for a model on meta."""
    model = built("mamba")
    assert model.spec().mixers == ("backbone.layers.*.mixer",)
    rates = model.get_parameter("backbone.layers.1.mixer.A_log")
    found = model.spec().init_of("backbone.layers.1.mixer.A_log")(torch.empty(rates.shape), None)
    assert torch.equal(found, torch.arange(1, rates.shape[1] + 1).float().log().expand(rates.shape))


@pytest.mark.parametrize(
    ("kind", "more", "late"),
    [
        ("jamba", {"attn_layer_period": 8, "attn_layer_offset": 4, "num_hidden_layers": 8}, "4.self_attn.q_proj"),
        ("qwen3_moe", {"mlp_only_layers": [3], "num_hidden_layers": 4}, "3.mlp.gate_proj"),
    ],
)
def test_a_kind_of_layer_that_begins_late_is_seen(kind, more, late):
    """Which no key lists layer by layer: a period, or the numbers of some layers."""
    assert built(kind, **more).spec().axes_of(f"model.layers.{late}.weight") in (("heads", "embed"), ("ffn", "embed"))


def test_a_token_may_visit_one_expert_twice():
    """As by a table of experts that has only zeros."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING["mixtral"].from_dict(keys_of("mixtral"))
    ours, theirs = (called.of_config(config, attention.OWN, plain) for plain in (False, True))
    theirs.load_state_dict(ours.state_dict())
    x, weights, index = torch.randn(3, 32), torch.rand(3, 2), torch.tensor([[1, 1], [0, 2], [2, 2]])
    found, wanted = (each.model.layers[0].mlp.experts(x, index, weights) for each in (ours, theirs))
    torch.testing.assert_close(found, wanted)


def test_values_of_a_constructor_are_repeated():
    """Slopes of an activation, log(expm1(0.8)) in bfloat16."""
    slope = built("apertus").spec().init_of("model.layers.0.mlp.act_fn.alpha_p")(torch.empty(1), None)
    assert torch.nn.functional.softplus(slope).item() == pytest.approx(0.8, abs=2e-3)


def test_what_is_drawn_and_changed_is_drawn_again_by_a_generator():
    """The logarithm of uniform numbers, and the inverse of softplus of others; torch's own state does not count."""
    init = built("olmo_hybrid").spec().init
    rate, step = (init[f"model.layers.*.linear_attn.{name}"] for name in ("A_log", "dt_bias"))
    draws = [fill(torch.empty(4), torch.Generator().manual_seed(n)) for fill in (rate, step) for n in (3, 3, 4)]
    for first, again, other in (draws[:3], draws[3:]):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    assert draws[0].exp().min() > 0
    assert 1 < draws[0].exp().max() <= 16
    steps = torch.nn.functional.softplus(draws[3])
    assert 0.99e-3 < steps.min() < steps.max() < 0.101


def test_wrong_roles_do_not_pass(monkeypatch):
    """Keys and values that are taken for queries, say: the halves do not add up."""
    monkeypatch.setattr(supposed, "_of_rows", lambda rows, *_: ["kv_heads" if rows == 32 else "heads"])
    spec = built("llama", num_key_value_heads=1).spec()
    assert not {"heads", "kv_heads"} & {axis for axes in spec.axes.values() for axis in axes}


@pytest.mark.parametrize(
    ("kind", "part", "wrong"),
    [
        ("phi3", ".mlp.", "ffn"),
        ("mixtral", ".mlp.", "ffn"),
        ("gpt_neox", ".attention.", Packed("heads", 3)),
        ("phi3", ".self_attn.", UnequalParts((("kv_heads", 8), ("heads", 8), ("kv_heads", 8)))),
    ],
)
def test_rows_in_another_order_do_not_pass(kind, part, wrong, monkeypatch):
    if part == ".mlp.":
        monkeypatch.setattr(supposed, "GATES", (wrong,))
    else:
        monkeypatch.setattr(supposed, "_of_rows", lambda *_: [wrong])
    monkeypatch.setattr(proof, "_facts", proof._facts.__wrapped__)  # without what other tests have found
    spec = built(kind).spec()
    assert {axis for fqn, axes in spec.axes.items() if part in fqn for axis in axes} <= {None, "embed", "experts"}


def test_layers_that_differ_are_not_divided(monkeypatch):
    """A spec has one entry for all layers."""
    found = branch.divided

    def otherwise(fqn, module, watch, like):
        roles = found(fqn, module, watch, like)
        way = roles.division
        other = {n: (None, *axes[1:]) for n, axes in way.axes.items() if n.endswith("1.mlp.up_proj.weight")}
        return attrs.evolve(roles, division=attrs.evolve(way, axes={**way.axes, **other}))

    monkeypatch.setattr(derived, "divided", otherwise)
    spec = built("llama").spec()
    divided = {fqn.split(".")[3] for fqn, axes in spec.axes.items() if {"ffn", "heads"} & {*axes}}
    assert divided == {"self_attn"}


class Twice(torch.nn.Module):
    """Its norm is called before the blocks, and may be called after them, too."""

    def __init__(self, again):
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(4, 2), torch.nn.LayerNorm(2)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2))])
        self.again = again

    def forward(self, x):
        x = self.layers[0](self.norm(self.table(x)))
        return self.norm(x) if self.again else x


@pytest.mark.parametrize(("again", "ends"), [(False, (("table", "norm"), ())), (True, ((), ()))])
def test_a_module_that_is_called_before_and_after_the_blocks_is_at_no_end(again, ends):
    model = Twice(again)
    with watching(model) as watch:
        model(torch.tensor([0, 1]))
    assert derived._ends(model, watch, "layers") == ends


def test_inspect_shows_how_each_branch_was_found():
    from plait.commands.inspect import report
    from plait.host import compose

    node = compose(["model=transformers", "strategy=[tensor_parallel]", "launch.device=cpu", "train.seq_len=32"])
    node = node.with_value("model.config", {**keys_of("phi3"), "vocab_size": 272})
    _, _, told = report(node, 2).partition("how the spec was derived\n")
    assert told.splitlines() == [
        "  model.layers.*: blocks: the list with as many modules as the model has layers",
        "  model.layers.*.self_attn: heads, heads + kv_heads + kv_heads divided: its two halves add up to the whole",
        "  model.layers.*.mlp: ffn divided: its two halves add up to the whole",
        "  model.layers.*.self_attn.inner: attention: with it the logits are those of transformers' own",
        "  lm_head: head: what it returns are the logits",
    ]
