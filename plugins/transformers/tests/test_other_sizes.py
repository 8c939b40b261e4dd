"""Sizes that the grid's small models do not have: gradients are those of transformers' own class, in float64."""

import functools

import families
import pytest
import torch
from grid import BOUND
from test_documents import gradients, in_float64, worst

from plait import PlaitError
from plait_testing.widened import Widened
from plait_transformers.build import decoder

SIZES = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 12, "vocab_size": 80}
STATES = {**SIZES, "num_key_value_heads": 4, "intermediate_size": 80, "mamba_d_state": 8}
GROUPS = {**STATES, "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 3}
MIXTURE = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
OTHER = {  # what is other than in the grid -> keys
    "fewer keys, each beside its queries": {
        **{"model_type": "falcon", **SIZES, "new_decoder_architecture": True, "num_kv_heads": 4},
    },
    "as many keys, each beside its query": {
        **{"model_type": "falcon", **SIZES, "new_decoder_architecture": True, "num_kv_heads": 12},
    },
    "a state narrower than the stream": {
        **{"model_type": "falcon_h1", **STATES, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8},
    },
    "a state as wide as the stream says": {
        **{"model_type": "falcon_h1", **STATES, "mamba_d_ssm": None, "mamba_n_heads": 24, "mamba_n_groups": 3},
    },
    "groups of states": {"model_type": "bamba", **GROUPS, "attn_layer_indices": [2]},
    "groups of states, and a mixture": {
        **{"model_type": "granitemoehybrid", **GROUPS, "num_local_experts": 6, "num_experts_per_tok": 2},
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    },
    "weights that evaluation changes": {
        **{"model_type": "rwkv", "num_hidden_layers": 4, "hidden_size": 96, "vocab_size": 80, "rescale_every": 2},
    },
    "a mixture, states and a feed-forward": {
        **{"model_type": "nemotron_h", **SIZES, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 80},
        **{**MIXTURE, "moe_shared_expert_intermediate_size": 56, "mamba_num_heads": 12, "mamba_head_dim": 8},
        **{
            "n_groups": 3,
            "ssm_state_size": 16,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        },
    },
    "branches inside a part of a block": {
        **{"model_type": "dbrx", "d_model": 96, "n_heads": 12, "n_layers": 4, "vocab_size": 80},
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 0.5, "kv_n_heads": 4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 2},
    },
}
LENGTHS = ((7, 9), (1, 15), (16,))  # of the documents of each row
UNDER = {
    "tensor_parallel": {"tensor_parallel": {"degree": 2}},
    "tensor_parallel, whole rows": {"tensor_parallel": {"degree": 2, "sequence_parallel": False}},
    "fsdp2": {"fsdp2": {}},
    "expert_parallel": {"fsdp2": {}, "expert_parallel": {"degree": 2}},
}
RUNS = [
    ("fewer keys, each beside its queries", "tensor_parallel"),
    ("as many keys, each beside its query", "tensor_parallel"),
    ("groups of states", "tensor_parallel"),
    ("a state narrower than the stream", "tensor_parallel"),
    ("weights that evaluation changes", "tensor_parallel, whole rows"),
    ("a mixture, states and a feed-forward", "tensor_parallel"),
    ("a mixture, states and a feed-forward", "expert_parallel"),
    ("branches inside a part of a block", "tensor_parallel"),
    ("branches inside a part of a block", "fsdp2"),
]


class Sized(families.OfFamily):
    """A trial of the keys `OTHER[kind]`."""

    def build(self):
        with torch.device("meta"):
            return decoder(config=OTHER[self.kind])


def theirs_of(what, ours):
    """transformers' own model, in training, with the values of `ours`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    keys = OTHER[what]
    config = CONFIG_MAPPING[keys["model_type"]].from_dict(keys)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **plain).double().train()
    model.load_state_dict(ours.state_dict())
    return model


DEAR = (
    *("a state narrower than the stream", "a state as wide as the stream says", "groups of states, and a mixture"),
    *("groups of states", "a mixture, states and a feed-forward", "branches inside a part of a block"),
    "weights that evaluation changes",
)


@pytest.mark.parametrize("what", [x if x not in DEAR else pytest.param(x, marks=pytest.mark.slow) for x in OTHER])
def test_gradients_are_those_of_transformers(what):
    """Of rows that are one document, and of packed documents, which transformers computes alone."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 80, (len(LENGTHS), 16), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in LENGTHS])
    weights = torch.randn(*tokens.shape, 80, generator=generator, dtype=torch.float64)
    with Widened():
        ours = in_float64(Sized(kind=what))
        own = theirs_of(what, ours)
        theirs = lambda ids: own(input_ids=ids, use_cache=False).logits  # noqa: E731
        wanted = gradients(own, [(theirs(tokens), weights)])
        for training in (True, False):
            assert worst(gradients(ours.train(training), [(ours(tokens), weights)]), wanted) < BOUND
        pieces = [
            (theirs(x[None]), w[None])
            for row, each in enumerate(LENGTHS)
            for x, w in zip(tokens[row].split(each), weights[row].split(each), strict=True)
        ]
        if ours.why_no_documents:
            with pytest.raises(PlaitError, match="without packed documents"):
                ours(tokens, positions)
        else:
            assert worst(gradients(ours, [(ours(tokens, positions), weights)]), gradients(own, pieces)) < BOUND


def on_rank(what, strategies):
    return families.train(Sized(kind=what, steps=2), strategies)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "strategy"), RUNS)
def test_ranks_agree_with_one_process(what, strategy, plait_ranks):
    run = functools.partial(plait_ranks.run, on_rank, what)
    (alone,) = run({}, world=1)
    for answer in run(UNDER[strategy], world=2):
        error, name = families.apart(answer, alone)
        assert error < BOUND, (name, error)


def test_what_is_divided_at_other_sizes():
    """The keys of a group lie beside its queries: as many shares as there are groups."""
    ours = Sized(kind="fewer keys, each beside its queries").build()
    assert ours.spec().sizes == {"heads": 12, "kv_heads": 4}
    assert ours.spec().axes_of("transformer.h.1.self_attention.query_key_value.weight") == ("kv_heads", "embed")
    ours = Sized(kind="as many keys, each beside its query").build()
    assert ours.spec().sizes == {"heads": 12}
    ours = Sized(kind="branches inside a part of a block").build()
    assert ours.spec().branches == ("transformer.blocks.*.norm_attn_norm.attn", "transformer.blocks.*.ffn")
    assert ours.spec().sizes == {"heads": 12, "kv_heads": 4}
    ours = Sized(kind="a mixture, states and a feed-forward").build()
    assert ours.spec().axes_of("model.layers.3.mixer.experts.up_proj")[0] == "experts"


def test_a_family_that_changes_its_weights_in_evaluation_computes_there_what_it_trains():
    ours = Sized(kind="weights that evaluation changes").build()
    assert ours.facts.as_in_training
    assert ours.eval().training
    assert not decoder(config=families.keys_of("llama")).eval().training
