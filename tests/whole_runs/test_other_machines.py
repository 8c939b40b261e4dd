"""An elastic run takes the steps of one process, whichever machines come and go: in float64, for many strategies."""

import contextlib
import json

import pytest

from plait.check.prepare import prepare
from plait.contract.config import Config
from plait.host import check, compose
from plait.records.run_folder import RunFolder
from plait_data import stream
from plait_testing import whole_run

CAME = (4, 2, 3, 4)  # machines with one rank each; those that do not fit are spares
STEPS = 3  # between two changes
MOE = ["model=qwen3_moe_debug", "model.head_dim=8", "model.n_experts=4", "model.ffn_dim=16"]
TINY = [
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48"),
    *("train.seq_len=32", "train.local_batch_size=3", "train.global_batch_size=12", "launch.device=cpu", "run.name=a"),
    *("validation.interval=3", "validation.batches=1", "checkpoint.export=false", "metrics.tensorboard=false"),
    *("schedule.warmup_steps=4", "schedule.min_lr_ratio=1", "checkpoint.interval=100", "checkpoint.mode=sync"),
    *(f"precision.{each}=float64" for each in ("storage", "param", "reduce")),
]
MIXES = {  # name -> (strategies and their options, options of one process too, numbers of machines that fit)
    "fsdp2": (["strategy=[fsdp2]"], [], (2, 3, 4)),
    "replicate": (["strategy=[fsdp2]", "strategy.fsdp2.shard=1", "strategy.fsdp2.replicate=-1"], [], (2, 3, 4)),
    "tensor_parallel": (["strategy=[tensor_parallel,fsdp2]", "strategy.tensor_parallel.degree=2"], [], (2, 4)),
    "context_parallel": (["strategy=[context_parallel,fsdp2]", "strategy.context_parallel.degree=2"], [], (2, 4)),
    "pipeline": (["strategy=[pipeline,fsdp2]", "strategy.pipeline.degree=2"], [], (2, 4)),
    "expert_parallel": (["strategy=[expert_parallel,fsdp2]", "strategy.expert_parallel.degree=2"], MOE, (2, 4)),
    "accumulation": (["strategy=[fsdp2]", "train.local_batch_size=1"], [], (2, 3, 4)),
    "zero": (["strategy=[zero]"], [], (2, 3, 4)),
    "lora": (["strategy=[lora,fsdp2]"], ["strategy.lora.random_base=true"], (2, 3, 4)),
    **{
        name: ([f"strategy=[{name},fsdp2]"], [f"strategy.{name}.degree=2", f"strategy.{name}.every=2"], (2, 4))
        for name in ("local_sgd", "diloco")
    },
}
ALONE = {"lora": ("lora", 1), "local_sgd": ("local_sgd", 2), "diloco": ("diloco", 2)}  # mix -> what trains undisturbed


def texts(folder):
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"<{i} " + "words " * (i * 5 % 11)}) + "\n" for i in range(400)))
    return path


def trained(ranks, folder, world, *overrides):
    """The rows of metrics of one start on `world` ranks."""
    with contextlib.chdir(folder):
        checked = check(compose([*TINY, *overrides]), world, folder / "runs" / "a")
        run = RunFolder(folder / "runs" / "a")
        try:
            assert prepare(checked, run, print) is None
        finally:
            run.unlock()
        checked.source.prepare(print)
    rows = ranks.run(whole_run.run, Config.of(run.read_config()), run.path, world=world)[0]
    return checked.machines, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "data"), [*((mix, "packed") for mix in MIXES), ("fsdp2", "stream"), ("tensor_parallel", "stream")]
)
def test_each_step_is_that_of_one_process(mix, data, plait_ranks, tmp_path, monkeypatch):
    strategies, model, fit = MIXES[mix]
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stream, "DEPTH", 8)
    text = texts(tmp_path)
    source = {
        "packed": ["data=text", f"data.path={text}", "data.validation_fraction=0.2", "data.attention=document"],
        "stream": [
            *("data=hf", "data.name=json", f"data.data_files={text}", "data.shuffle_buffer=7"),
            *("data.validation_documents=9", "data.attention=document"),
        ],
    }[data]
    together, rows = ["launch.nnodes='2:4'", "launch.nproc_per_node=1", "launch.rdzv_endpoint=here:29500"], []
    for number, came in enumerate(CAME, 1):
        world = max(count for count in fit if count <= came)
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(world))
        steps = f"train.steps={number * STEPS}"
        machines, more = trained(plait_ranks, tmp_path, world, *model, *source, *strategies, *together, steps)
        assert machines == fit
        rows += more
    (tmp_path / "one").mkdir()
    parts = [f"train.data_parts={4 if len(fit) == 3 else 2}"]
    strategy, world = ALONE.get(mix, ("", 1))  # workers that train apart are as many ranks
    alone = [*model, *source, *parts, f"strategy=[{strategy}]", f"train.steps={len(CAME) * STEPS}"]
    _, reference = trained(plait_ranks, tmp_path / "one", world, *alone)
    assert [row["step"] for row in rows] == [row["step"] for row in reference]
    for mine, other in zip(rows, reference, strict=True):
        assert mine["tokens"] == other["tokens"]
        for key in ("loss", "grad_norm", *(["val_loss"] if "val_loss" in other else [])):
            assert abs(mine[key] - other[key]) <= 1e-9 * abs(other[key]), (key, mine, other)
