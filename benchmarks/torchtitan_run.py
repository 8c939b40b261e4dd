"""A run of `plait train`, trained by torchtitan 0.2.2 instead: python benchmarks/torchtitan_run.py ROWS [overrides]

The overrides are those of `plait train`. Model, data, batch, precision, recomputation, compilation and optimizer come
from the config that they resolve to, on one device. ROWS gets a line per step, as metrics.jsonl has them: the same
clock, the same count of operations per token, the same kind of memory. torchtitan trains through its own `Trainer`;
only its tokenizer and dataset are replaced, by Plait's batches.
"""

import importlib.util
import json
import os
import socket
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

Config = Mapping[str, Any]
BLOCKS_OF = 8  # a feed-forward of torchtitan's llama3 has a multiple of this width


class NoEqual(Exception):
    """torchtitan cannot train the same."""


def llama3(model: Config) -> dict[str, Any]:
    """Arguments of torchtitan's llama3 for a config of Plait's. It computes the width of its feed-forward."""
    scaling = model["rope_scaling"] or {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    named = {"scaling_factor": scaling["factor"]} | {
        key: scaling[key] for key in ("low_freq_factor", "high_freq_factor")
    }
    named["original_max_position_embeddings"] = scaling.get("original_max_seq_len", 8192)
    return {
        **_same(model, "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta"),
        "multiple_of": BLOCKS_OF,
        "ffn_dim_multiplier": model["ffn_dim"] / int(8 * model["dim"] / 3),
        "rope_scaling_args": named,
    }


def qwen3(model: Config) -> dict[str, Any]:
    if model["rope_scaling"] or model.get("n_experts"):
        raise NoEqual("its qwen3 is compared without YaRN and without experts")
    same = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "norm_eps", "rope_theta")
    return {**_same(model, *same), "hidden_dim": model["ffn_dim"], "enable_weight_tying": model["tie_embeddings"]}


def deepseek_v3(model: Config) -> dict[str, Any]:
    if model["balance_loss"]:
        raise NoEqual("its experts have no balance loss: take model.balance_loss=0")
    same = ("dim", "n_layers", "n_dense_layers", "n_heads", "kv_lora_rank", "vocab_size", "norm_eps", "rope_theta")
    heads = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    groups = {"num_expert_groups": model["n_groups"], "num_limited_groups": model["top_groups"]}
    return {
        **_same(model, *same, *heads),
        "inter_dim": model["ffn_dim"],
        "moe_inter_dim": model["expert_ffn_dim"],
        "q_lora_rank": model["q_lora_rank"] or 0,
        "moe_args": {
            "num_experts": model["n_experts"],
            "num_shared_experts": model["n_shared_experts"],
            "top_k": model["top_k"],
            "score_func": model["score"],
            "route_norm": model["norm_weights"],
            "route_scale": model["route_scale"],
            "score_before_experts": False,
            "load_balance_coeff": model["bias_update"] or None,
            **(groups if model["n_groups"] > 1 else {}),
        },
    }


FAMILIES = {"plait_models.llama3.Llama3": llama3, "plait_models.qwen3.Qwen3": qwen3} | {
    "plait_models.deepseek_v3.DeepSeekV3": deepseek_v3
}


def _same(model: Config, *keys: str) -> dict[str, Any]:
    return {key: model[key] for key in keys}


def on_a_processor() -> None:
    """Before torchtitan is imported: it asks an accelerator for its name and memory, has a kernel in triton, and counts
    integers by `histc`, which takes none on a CPU."""
    torch._utils._get_available_device_type = lambda: "cpu"
    answers = {
        "get_device_name": "cpu",
        "get_device_properties": types.SimpleNamespace(total_memory=1),
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "current_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    _pretend("torchtitan.models.moe.kernels", "generate_permute_indices")  # a loop replaces it and the grouped product
    count = torch.histc
    torch.histc = lambda x, *args, **kwargs: count(x.float(), *args, **kwargs).to(x.dtype)


def without_datasets() -> None:
    """torchtitan imports `datasets` for data that is not used here."""
    if importlib.util.find_spec("datasets") is None:
        _pretend("datasets", "Dataset", "load_dataset")
        _pretend("datasets.distributed", "split_dataset_by_node")


def _pretend(module: str, *names: str) -> None:
    sys.modules[module] = types.ModuleType(module)
    vars(sys.modules[module]).update(dict.fromkeys(names, object))


@attrs.frozen
class SameBatches:
    """Plait's batches, in order, as torchtitan's trainer reads them."""

    batches: Any

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        step = 0
        while True:
            batch = self.batches.train(step)
            yield {"input": batch.tokens}, batch.labels
            step += 1


def register(config: Config) -> None:
    """The model and data of `config` as torchtitan's model "plait", flavor "same"."""
    import dataclasses

    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.moe import MoEArgs
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    from plait.compose.targets import build_source

    family = FAMILIES[config["model"]["_target_"]]
    arguments = family(config["model"])
    for key, kind in (("rope_scaling_args", RoPEScalingArgs), ("moe_args", MoEArgs)):
        if key in arguments:
            arguments[key] = kind(**arguments[key])
    spec = get_train_spec(family.__name__)
    example = next(iter(spec.model_args.values()))
    tie = config["model"].get("tie_embeddings") and "enable_weight_tying" not in arguments
    train = config["train"]

    def batches(**_: Any) -> SameBatches:
        source = build_source(config["data"])
        source.prepare(print)
        size = train["local_batch_size"]
        opened = source.open(seq_len=train["seq_len"], seed=train["seed"], global_batch_size=size, dp=(0, 1))
        return SameBatches(opened)

    same = dataclasses.replace(
        spec,
        model_cls=tied(spec.model_cls) if tie else spec.model_cls,
        model_args={"same": type(example)(**arguments)},
        build_tokenizer_fn=None,
        build_dataloader_fn=batches,
        state_dict_adapter=None,
    )
    register_train_spec("plait", same)


def tied(model: Any) -> Any:
    """torchtitan's llama3 has no tied embeddings; tie them as its qwen3 does: once more after `to_empty`."""

    class Tied(model):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.output.weight = self.tok_embeddings.weight

        def init_weights(self, *args: Any, **kwargs: Any) -> None:
            self.output.weight = self.tok_embeddings.weight
            super().init_weights(*args, **kwargs)

    return Tied


def job(config: Config, folder: str) -> Any:
    """torchtitan's config for a resolved config of Plait's."""
    from torchtitan.config import JobConfig

    train, optimizer, remat, schedule = (config[key] for key in ("train", "optimizer", "remat", "schedule"))
    if remat["mode"] not in ("none", "full"):
        raise NoEqual(f"its recomputation has nothing like remat.mode={remat['mode']}")
    if optimizer["_target_"] != "torch.optim.AdamW":
        raise NoEqual(f"optimizer._target_={optimizer['_target_']} is not compared")
    made = JobConfig()
    made.job.dump_folder = folder
    made.model.name, made.model.flavor = "plait", "same"
    made.training.local_batch_size, made.training.seq_len = train["local_batch_size"], train["seq_len"]
    made.training.steps, made.training.max_norm = train["steps"], train["max_norm"]
    made.training.gc_freq = train["gc_interval"] or train["steps"] + 1
    made.training.dtype = config["precision"]["storage"]
    made.training.mixed_precision_param = config["precision"]["param"]
    made.optimizer.lr, made.optimizer.eps = optimizer["lr"], optimizer["eps"]
    made.optimizer.beta1, made.optimizer.beta2 = optimizer["betas"]
    made.optimizer.weight_decay = optimizer["weight_decay"]  # of all parameters, as by optimizer.decays=all
    made.lr_scheduler.warmup_steps = min(schedule["warmup_steps"], train["steps"])
    made.activation_checkpoint.mode = remat["mode"]
    made.compile.enable, made.compile.backend = config["compile"]["enabled"], config["compile"]["backend"]
    made.metrics.log_freq = config["metrics"]["log_every"]
    made.debug.seed = train["seed"]
    made.checkpoint.enable = config["checkpoint"]["enabled"]
    made.checkpoint.interval = config["checkpoint"]["interval"] or train["steps"] + 1
    made.checkpoint.last_save_model_only = False
    return made


def train(config: Config, folder: str) -> list[dict[str, Any]]:
    """A row per step. Raises NoEqual if torchtitan's model has another number of parameters."""
    from torchtitan.train import Trainer

    from plait.compose.build import build_model
    from plait.records.peak_flops import peak_flops
    from plait.train.step_metrics import Laps, peak_memory

    class Timed(Trainer):
        """The same, with an event after each step, which nothing waits for before the end."""

        seen: list[Any]

        def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
            self.loss = super().forward_backward_step(**kwargs)
            return self.loss

        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            self.seen.append((laps.end(), self.loss.detach(), peak_memory(self.device)[0]))

    model, spec = build_model(config["model"])
    register(config)
    trainer = Timed(job(config, folder))
    trainer.seen = []
    theirs, ours = (sum(p.numel() for p in each.parameters()) for each in (trainer.model_parts[0], model))
    if theirs != ours:
        raise NoEqual(f"its model has {theirs:,} parameters, and Plait's {ours:,}")
    laps = Laps(trainer.device)
    trainer.train()
    sizes, device = config["train"], trainer.device.type
    tokens = sizes["local_batch_size"] * sizes["seq_len"]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    flops, peak = spec.flops, peak_flops(device, name, config["precision"]["param"])
    rows = []
    for step, (seconds, loss, memory) in enumerate(trainer.seen, 1):
        speed = tokens / seconds()
        mfu = flops(sizes["seq_len"]) * speed / peak if flops and peak else None
        row = {"step": step, "loss": float(loss), "tokens": step * tokens, "tokens_per_second": speed, "mfu": mfu}
        rows.append({**row, "peak_memory_bytes": memory})
    trainer.close()
    return rows


def main() -> None:
    out, *overrides = sys.argv[1:]
    from plait.host import compose
    from plait.parallel.allocator import grow_segments
    from plait.parallel.process_group import device_of, end_group, local_device
    from plait.system.sockets import listen_on_loopback

    config = compose(overrides).plain()
    if (kind := device_of(config["launch"]["device"])) == "cpu":
        on_a_processor()
    else:
        grow_segments(local_device(kind))
    listen_on_loopback()
    without_datasets()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    from torchtitan.tools.logging import init_logger

    init_logger()  # its line per step, which torchtitan computes in any case
    with tempfile.TemporaryDirectory(prefix="plait-torchtitan-") as folder:
        try:
            rows = train(config, folder)
        except NoEqual as reason:
            sys.exit(f"torchtitan: {reason}")
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    end_group()


if __name__ == "__main__":
    main()
