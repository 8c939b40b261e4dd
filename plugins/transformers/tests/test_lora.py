"""plait-lora's adapters on families of transformers, their experts included."""

import json
from fnmatch import fnmatch

import attrs
import families
import pytest
import torch
from grid import BOUND, UNDER
from safetensors.torch import load_file

from plait import hookimpl, whole_tensor
from plait.host import check, compose
from plait.ops import Normal
from plait.testing import raises_about, train
from plait_testing import whole_run

LORA = {"rank": 3, "alpha": 12.0}
SLOW = pytest.mark.slow


@attrs.define
class Nudge:
    """Draws B too: beside B = 0 the gradients of A are 0 in every layout."""

    name = "nudge"
    after = ("lora",)
    phase = "model"

    @hookimpl
    def extend(self, spec):
        init = {key: Normal(0.3) if fnmatch(key, "*lora_B") else fill for key, fill in spec.init.items()}
        return attrs.evolve(spec, init=init)


def adapted(kind, strategies, targets=("heads", "ffn")):
    trial = families.OfFamily(kind=kind, steps=2)
    return train(trial, {"lora": {**LORA, "targets": [*targets]}, **strategies}, [Nudge()])


def check_gradients(pool, kind, strategy, *targets):
    """The answers of the ranks; their gradients are those of one process, and none is 0."""
    (one,) = pool.once(adapted, kind, {}, *targets, world=1)
    assert {name for name in one.gradients if "lora_" not in name} == set()
    assert min(float(grad.norm()) for grad in one.gradients.values()) > 0
    answers = pool.run(adapted, kind, UNDER[strategy], *targets, world=2)
    for result in answers:
        error, name = families.apart(result, one)
        assert error < BOUND, name
    return answers


@pytest.mark.parametrize("kind", ["mixtral", *(pytest.param(k, marks=SLOW) for k in ("deepseek_v3", "qwen2_moe"))])
@pytest.mark.parametrize(
    "strategy", [*(pytest.param(s, marks=SLOW) for s in ("fsdp2", "expert_parallel")), "tensor_parallel"]
)
def test_gradients_of_experts_adapters_equal_those_of_one_process(kind, strategy, plait_ranks):
    for result in check_gradients(plait_ranks, kind, strategy):
        lies = result.placements["model.layers.1.mlp.experts.gate_up_proj_lora_B"]
        assert strategy != "tensor_parallel" or lies == "_S(1, 2) over tp"  # its part of the gate, and of the other


@SLOW
@pytest.mark.parametrize("strategy", ["fsdp2", "tensor_parallel"])
def test_matrices_of_branches_that_stay_whole_can_be_chosen(strategy, plait_ranks):
    """phi3's attention, whose matrices have no other axis than embed."""
    for result in check_gradients(plait_ranks, "phi3", strategy, ["embed"]):
        assert "model.layers.0.self_attn.qkv_proj.lora_B" in result.gradients


def assembled(model, targets):
    from plait.contract.config import Config
    from plait.parallel.assembly import assemble_model
    from plait.strategies.registry import create_all

    return assemble_model(model, model.spec(), create_all({"lora": {"targets": targets}}), Config(), 1, "cpu").extend()


def test_transposed_experts_are_refused_by_name():
    """An adapter's two matrices would be the wrong way round."""
    model = families.OfFamily(kind="aria_text").build()
    with raises_about("strategy.lora.targets", ["heads", "ffn"], ["heads", "kv_heads"]) as raised:
        assembled(model, ["heads", "ffn"])
    assert "'model.layers.0.mlp.experts.down_proj', a stack of experts of a AriaExperts" in str(raised.value)
    assert str(raised.value).endswith("targets that only other matrices have: heads, kv_heads")


def job(node, folder):
    """Train, export, and return the adapters."""
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    trainer = Trainer(node, RunFolder(folder), lambda text: None)
    trainer.restore()
    trainer.fit()
    trainer.checkpoints.export()
    state = trainer.applied.checkpoint(trainer.optimizer)[0]
    whole = {key: whole_tensor(tensor).clone() for key, tensor in state.items()}
    return {key.removeprefix("model."): t for key, t in whole.items() if key.startswith("model.") and "lora_" in key}


@SLOW
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_merged_export_is_loaded_by_transformers(kind, plait_ranks, tmp_path):
    """Each adapted matrix is W + alpha / rank B A, and all others are those of the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**families.keys_of(kind), "vocab_size": 272})
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    lora, model = {"lora": {**LORA, "merge": "true"}}, ("model=transformers", f"model.path={tmp_path / 'base'}")
    more = ("train.steps=3", "optimizer.lr=0.05", "validation.interval=0", "data.tokenizer=bytes")
    given = whole_run.overrides({**lora, **UNDER["fsdp2"]}, tmp_path, 2, *more, model=model)
    run = tmp_path / "run"
    run.mkdir()
    (run / "versions.json").write_text("{}")
    adapters = plait_ranks.run(job, check(compose(given), 2).config, run, world=2)[0]
    merged, theirs = AutoModelForCausalLM.from_pretrained(run / "export").state_dict(), base.state_dict()
    assert json.loads((run / "export" / "config.json").read_text())["model_type"] == kind
    exported, held = (load_file(each / "model.safetensors").keys() for each in (run / "export", tmp_path / "base"))
    assert exported == held
    changed = 0
    for name, weight in theirs.items():
        stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        if f"{stem}lora_A" in adapters:
            changed += 1
            added = 4.0 * adapters[f"{stem}lora_B"].double() @ adapters[f"{stem}lora_A"].double()
            assert float(added.abs().max()) > 1e-3
            weight = (weight.double() + added).float()
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-7)
    assert changed == len(adapters) // 2 > 0
