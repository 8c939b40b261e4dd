"""What a run with adapters saves, resumes from and exports."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from plait.compose.build import build_model
from plait.host import Store, check, compose
from plait.records.run_folder import RunFolder
from plait.testing import unequal
from plait.train.trainer import Trainer
from plait_testing import whole_run
from plait_testing.pool import RankError

LORA, FSDP2, TENSOR = {"lora": {"rank": 2, "random_base": True}}, {"fsdp2": {}}, {"tensor_parallel": {"degree": 2}}
EXACT = [f"precision.{which}=float64" for which in ("storage", "param", "reduce")]
MOE = ("model=deepseek_v3_debug", "model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.ffn_dim=48")
TARGETS = ("layers.{}.attention.wq", "layers.{}.attention.wo", *(f"layers.{{}}.feed_forward.w{i}" for i in (1, 2, 3)))


def job(node, folder, steps, export):
    """Train up to step `steps`; the weights as they then are, whole."""
    seen = whole_run.Rows()
    trainer = Trainer(node, RunFolder(folder), lambda text: None, [seen])
    start = trainer.restore()
    trainer.config = trainer.config.with_value("train.steps", steps)
    trainer.fit()
    rows = [(row["step"], row["loss"], row["grad_norm"]) for row in seen.rows]
    if export:
        trainer.checkpoints.export()
    state = trainer.applied.checkpoint(trainer.optimizer)[0]
    whole = {key: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for key, t in state.items()}
    return start, rows, whole


@pytest.fixture
def trained(plait_ranks, tmp_path):
    """trained(name, strategies, world, *overrides) runs in the folder `name`."""

    def run(name, strategies, world, *more, steps=6, export=False, model=whole_run.MODEL):
        over = ("train.steps=6", *more)
        if any(strategy != "lora" for strategy in strategies):
            over = ("train.global_batch_size=8", *over)
        given = whole_run.overrides(strategies, tmp_path, world, *over, model=model)
        node = check(compose(given), world).config
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            (folder / "versions.json").write_text("{}")
        return plait_ranks.run(job, node, folder, steps, export, world=world)[0]

    run.folder = tmp_path  # type: ignore[attr-defined] # where the runs are
    return run


def saved(folder, step):
    return Store.read(folder / "checkpoints" / f"step-{step}")


def test_a_checkpoint_holds_the_adapters_alone(trained):
    """By the names in its manifest, the entries of its files, and their bytes."""
    from plait.checkpoint.reader import Reader

    trained("a", {**LORA, **FSDP2}, 2)
    adapters = {f"{m.format(layer)}.lora_{x}" for m in TARGETS for layer in (0, 1) for x in "AB"}
    assert set(saved(trained.folder / "a", 6).parameters) == adapters
    entries = {f"model.{name}" for name in adapters}
    entries |= {f"optimizer.{name}.{key}" for name in adapters for key in ("exp_avg", "exp_avg_sq", "step")}
    assert set(Reader(trained.folder / "a" / "checkpoints" / "step-6").shapes) == entries
    assert saved(trained.folder / "a", 6).data["frozen"] == saved(trained.folder / "a", 3).data["frozen"] != ""


@pytest.mark.slow
def test_a_run_goes_on_bitwise_and_in_another_layout(trained):
    whole = trained("whole", {**LORA, **FSDP2}, 2)
    first = trained("parts", {**LORA, **FSDP2}, 2, steps=3)
    again = trained("parts", {**LORA, **FSDP2}, 2)
    assert (first[0], again[0]) == (0, 3)
    assert first[1] + again[1] == whole[1]
    assert unequal(again[2], whole[2]) is None

    exact = trained("exact", {**LORA, **FSDP2}, 2, *EXACT)
    for name, beside, world in (("one", {}, 1), ("both", {**FSDP2, **TENSOR}, 4)):
        trained(name, {**LORA, **FSDP2}, 2, *EXACT, steps=3)
        start, rows, _ = trained(name, {**LORA, **beside}, world, *EXACT)
        assert start == 3
        for row, expected in zip(rows, exact[1][3:], strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


def base(folder, seed, model=whole_run.MODEL):
    """A file of weights for `model`, in float64."""
    built, _ = build_model(compose([*model]).model)
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64) / 8 for name, p in built.named_parameters()
    }
    values |= {name: torch.zeros_like(b, device="cpu") for name, b in built.state_dict().items() if name not in values}
    file = folder / f"base-{seed}.safetensors"
    save_file(values, file)
    return file, values


@pytest.mark.slow
def test_another_base_is_refused(trained):
    file, _ = base(trained.folder, 1)
    other, changed = base(trained.folder, 2)[0], trained.folder / "changed.safetensors"
    values = load_file(file)
    values["layers.1.attention.wv.weight"][3, 5] += 1e-3
    save_file(values, changed)
    trained("a", {**LORA, **FSDP2}, 2, f"checkpoint.init_from={file}", steps=3)
    for wrong in (other, changed, None):
        given = [] if wrong is None else [f"checkpoint.init_from={wrong}"]
        with pytest.raises(RankError, match=r"had other frozen parameters, .*base-1"):
            trained("a", {**LORA, **FSDP2}, 2, *given)
    moved = trained.folder / "moved.safetensors"
    file.rename(moved)
    assert trained("a", {**LORA, **TENSOR}, 2, f"checkpoint.init_from={moved}")[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beside", "world", "model"),
    [
        ({}, 1, whole_run.MODEL),
        ({**FSDP2, **TENSOR}, 4, whole_run.MODEL),
        ({**FSDP2, "expert_parallel": {"degree": 2}}, 2, MOE),
    ],
    ids=str,
)
def test_merged_it_is_a_plain_model(trained, beside, world, model):
    """W + alpha / rank B A, which loads as a model without adapters and computes the same logits."""
    file, values = base(trained.folder, 1, model)
    lora = {"lora": {"rank": 3, "alpha": 6.0, "merge": "true", "random_base": True}}
    given = (*EXACT, f"checkpoint.init_from={file}", "optimizer.lr=0.05")
    _, _, state = trained("a", {**lora, **beside}, world, *given, export=True, model=model)
    merged = load_file(trained.folder / "a" / "export" / "model.safetensors")
    assert merged.keys() == values.keys()
    adapted = 0
    for name, value in values.items():
        stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        pair = [state.get(f"model.{stem}lora_{x}") for x in "AB"]
        expected = value
        if pair[0] is not None:
            adapted += 1
            expected = value + 2.0 * pair[1] @ pair[0]
            assert float((expected - value).abs().max()) > 1e-3
        if "router" not in name:
            torch.testing.assert_close(merged[name], expected, rtol=1e-14, atol=1e-15)
    assert adapted == sum(key.endswith("lora_A") for key in state)
    plain = plain_logits(merged, model)
    assert float((plain - adapted_logits(values, state, model)).abs().max()) <= 1e-12 * float(plain.abs().max())


def plain_logits(values, model, strategies=()):
    import plait

    node = compose([*model]).model
    built, spec = build_model(node)
    exact = plait.Precision("float64", "float64", "float64")
    applied = plait.apply(built, spec, strategies, precision=exact)
    state = applied.parts[0].state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(values[name])
        return applied.parts[0](torch.arange(64).view(2, 32))


def adapted_logits(values, state, model):
    from plait_lora import Lora

    adapters = {k.removeprefix("model."): v for k, v in state.items() if "lora_" in k and k.startswith("model.")}
    return plain_logits({**values, **adapters}, model, [Lora(rank=3, alpha=6.0)])


def test_adapters_are_exported_as_peft_names_them(trained):
    _, _, state = trained("a", {**LORA, **FSDP2}, 2, export=True)
    folder = trained.folder / "a" / "export"
    assert {f.name for f in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json", "SHA256SUMS"}
    found = load_file(folder / "adapter_model.safetensors")
    wanted = {
        f"base_model.model.{key.removeprefix('model.')}.weight": value
        for key, value in state.items()
        if key.startswith("model.") and "lora_" in key
    }
    assert unequal(found, wanted) is None
    config = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == sorted({m.format(layer) for m in TARGETS for layer in (0, 1)})
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 16.0, "LORA")


@pytest.mark.slow
def test_a_finished_run_exports_again_if_it_is_to_merge(tmp_path):
    arguments = [*whole_run.overrides(LORA, tmp_path, 1, "train.steps=2", "run.name=a")]
    export = tmp_path / "runs" / "a" / "export"
    names = []
    for more in ([], ["strategy.lora.merge=true"], ["strategy.lora.merge=true"]):
        process = whole_run.start([*arguments, *more], tmp_path)
        said = process.communicate()[0]
        assert process.returncode == 0, said
        names.append({file.name for file in export.glob("*.safetensors")})
        told = "strategy.lora.merge=True differs from what was exported; the run writes its weights again" in said
        assert told == (len(names) == 2)
    assert names == [{"adapter_model.safetensors"}, {"model.safetensors"}, {"model.safetensors"}]
