"""DeepSeek's table: V3's form if the router's scores are sigmoids, V2's if they are a softmax."""

from typing import Any

import attrs
import torch
from torch import Tensor

from plait import PlaitError
from plait.ops import HuggingFace, Rule
from plait_models.hugging_face import common

OURS, THEIRS = f"{common.OURS}.attention", f"{common.THEIRS}.self_attn"
FFN, MLP = f"{common.OURS}.feed_forward", f"{common.THEIRS}.mlp"


@attrs.frozen
class Neighbours:
    """There RoPE pairs neighbouring rows; here a row of the first half with the same row of the second.

    unit:   rows of one head; None: all rows are one head.
    turned: how many of them, the last ones, RoPE rotates.
    """

    unit: int | None
    turned: int

    def to_ours(self, theirs: Tensor) -> Tensor:
        return self._apart(theirs, (-1, 2))

    def to_theirs(self, ours: Tensor) -> Tensor:
        return self._apart(ours, (2, -1))

    def _apart(self, rows: Tensor, pairs: tuple[int, int]) -> Tensor:
        heads = rows.unflatten(0, (-1, self.unit or len(rows)))
        kept, turned = heads.split([heads.shape[1] - self.turned, self.turned], dim=1)
        turned = turned.unflatten(1, pairs).transpose(1, 2).flatten(1, 2)
        return torch.cat([kept, turned], dim=1).flatten(0, 1)


def table(model: Any) -> HuggingFace:
    """The table of a `DeepSeekV3`. Raises PlaitError for options that neither form has."""
    attention, rope = model.layers["0"].attention, model.rope
    mixtures = [block.feed_forward for block in model.layers.values() if hasattr(block.feed_forward, "router")]
    if not mixtures:
        raise PlaitError(
            "Hugging Face's form of DeepSeek has experts in a block, and model.n_dense_layers leaves none"
        ).at("model.n_dense_layers", model.n_dense_layers, fits=f"less than {model.n_layers}")
    router = mixtures[0].router
    v3 = router.score == "sigmoid"
    _fits(model, router, v3)
    turned = Neighbours(unit=attention.nope + attention.turned, turned=attention.turned)
    rules = [
        *common.AROUND,
        Rule(f"{OURS}.wq.weight", f"{THEIRS}.q_proj.weight", turned),
        Rule(f"{OURS}.wq_a.weight", f"{THEIRS}.q_a_proj.weight"),
        Rule(f"{OURS}.q_norm.weight", f"{THEIRS}.q_a_layernorm.weight"),
        Rule(f"{OURS}.wq_b.weight", f"{THEIRS}.q_b_proj.weight", turned),
        Rule(f"{OURS}.wkv_a.weight", f"{THEIRS}.kv_a_proj_with_mqa.weight", Neighbours(None, attention.turned)),
        Rule(f"{OURS}.kv_norm.weight", f"{THEIRS}.kv_a_layernorm.weight"),
        Rule(f"{OURS}.wkv_b.weight", f"{THEIRS}.kv_b_proj.weight"),
        Rule(f"{OURS}.wo.weight", f"{THEIRS}.o_proj.weight"),
        *common.DENSE,
        *(Rule(f"{FFN}.shared.{w}.weight", f"{MLP}.shared_experts.{x}.weight") for w, x in common.LINEARS.items()),
        *common.EXPERTS,
    ]
    if v3:
        rules.append(Rule(f"{FFN}.router.bias", f"{MLP}.gate.e_score_correction_bias"))
    rules += common.UNBIASED
    kind, architecture = ("deepseek_v3", "DeepseekV3ForCausalLM") if v3 else ("deepseek_v2", "DeepseekV2ForCausalLM")
    greedy = "greedy" if router.n_groups == 1 else "group_limited_greedy"
    config = {
        **common.config_of_decoder(model, kind, architecture),
        "num_key_value_heads": model.n_heads,
        "q_lora_rank": attention.wq_a.out_features if attention.low_rank_queries else None,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope,
        "qk_rope_head_dim": attention.turned,
        "v_head_dim": attention.value,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "rope_interleave": True,
        "first_k_dense_replace": model.n_dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": mixtures[0].experts.w1.shape[1],
        "n_routed_experts": len(router.weight),
        "n_shared_experts": model.n_shared_experts,
        "num_experts_per_tok": router.top_k,
        "n_group": router.n_groups,
        "topk_group": router.top_groups,
        "topk_method": "noaux_tc" if v3 else greedy,
        "scoring_func": router.score,
        "norm_topk_prob": router.norm_weights,
        "routed_scaling_factor": router.scale,
        "num_nextn_predict_layers": 0,
    }
    if model.n_dense_layers:
        config["intermediate_size"] = model.layers["0"].feed_forward.w1.out_features
    if rope.scaling is not None:
        sharper = {"mscale": rope.scaling.mscale, "mscale_all_dim": rope.scaling.mscale_all_dim}
        config["rope_scaling"] = {**common.yarn(rope.scaling), **sharper}
    second_token = f"model.layers.{model.n_layers}."  # the module that predicts it
    return HuggingFace(rules, config, (*common.SKIPPED, second_token))


def _fits(model: Any, router: Any, v3: bool) -> None:
    kind, group_top = ("sigmoid", 2) if v3 else ("softmax", 1)
    if router.n_groups > 1 and router.group_top != group_top:
        raise PlaitError(
            f"model.group_top is {router.group_top}, but Hugging Face's form of DeepSeek with model.score={kind} "
            f"scores a group by its best {group_top}"
        ).at("model.group_top", router.group_top, fits=(group_top,))
    if not v3 and router.norm_weights:
        raise PlaitError(
            "model.norm_weights is true; with softmax Hugging Face's form of DeepSeek leaves them as they are"
        ).at("model.norm_weights", True, fits=(False,))
    if not model.n_shared_experts:
        raise PlaitError("model.n_shared_experts is 0, but Hugging Face's form of DeepSeek has at least one").at(
            "model.n_shared_experts", 0, fits="at least 1"
        )
    if model.norm.eps != 1e-6:
        raise PlaitError(
            f"model.norm_eps is {model.norm.eps}, but Hugging Face's form of DeepSeek fixes it to 1e-6"
        ).at("model.norm_eps", model.norm.eps, fits=(1e-6,))
