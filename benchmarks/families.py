"""Families of transformers by Plait beside transformers' own Trainer: python benchmarks/families.py [FAMILY ...]

A small model of each family, with random weights as `save_pretrained` writes them, is trained on rows of the standard
library by the Trainer in one process and by `plait train` on 4 ranks, with the same rows, optimizer and clipping.
Printed is how far the losses are apart at the worst of `--steps` steps. With `--cycles`, both also train in one process
in turns, in random order: tokens per second, and their ratio. `--beside bare` takes a loop of torch over transformers'
model in the place of the Trainer, which needs no environment of its own.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from first_step import ratio
from machine import about
from peers import command, run, speed

ROWS, SEQ_LEN, RANKS = 8, 128, 4
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 272}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
KEPT = {"index_topk": 32, "index_head_dim": 32, "index_n_heads": 4}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {  # keys of a configuration, beside SIZES
    "qwen3": {"num_hidden_layers": 4, "intermediate_size": 256},
    "qwen3_5_text": {"num_hidden_layers": 4, "intermediate_size": 256, **DELTA},
    "gemma4_text": {
        **{"num_hidden_layers": 6, "intermediate_size": 256, "sliding_window": 32, "final_logit_softcapping": 30.0},
        **{"hidden_size_per_layer_input": 0, "per_layer_config": {5: {"head_dim": 64}}},
    },
    "gpt_oss": {"num_hidden_layers": 4, "intermediate_size": 128, "num_local_experts": 8, "sliding_window": 32}
    | {"num_experts_per_tok": 2},
    "deepseek_v32": {
        **{"num_hidden_layers": 3, "intermediate_size": 256, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "num_key_value_heads": 4, **EXPERTS, **LATENT, **KEPT},
    },
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "moe", "full_attention", "mlp"], "intermediate_size": 256},
        **{"n_routed_experts": 8, "moe_shared_expert_intermediate_size": 64, **EXPERTS, **MAMBA},
    },
}
LAYOUTS = {
    "fsdp2": ["strategy=[fsdp2]"],
    "tensor_parallel 2, fsdp2 2": ["strategy=[tensor_parallel,fsdp2]", "strategy.tensor_parallel.degree=2"],
    "expert_parallel 2 of fsdp2 4": ["strategy=[expert_parallel,fsdp2]", "strategy.expert_parallel.degree=2"],
}


def saved(folder: Path, family: str) -> Path:
    """The folder of a small model of `family` with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return folder / family


def overrides(folder: Path, cache: Path, dtype: str) -> list[str]:
    return [
        *(f"precision.{each}={dtype}" for each in ("storage", "param", "reduce")),
        *("model=transformers", f"model.path={folder}", "data.tokenizer=bytes", f"data.cache_dir={cache}"),
        *(f"train.seq_len={SEQ_LEN}", f"train.local_batch_size={ROWS}", "optimizer.lr=0.0003", "optimizer.decays=all"),
        "schedule.decay_steps=0",
    ]


def on_ranks(layout: list[str], steps: int, asked: list[str]) -> dict[int, float] | str:
    """The loss of each step; the last line of the command, if it ended with an error."""
    from plait.host import metrics

    tensor = 2 if "strategy.tensor_parallel.degree=2" in layout else 1
    settings = [
        *("launch.device=cpu", f"launch.nproc_per_node={RANKS}", f"train.steps={steps}", "schedule.warmup_steps=0"),
        *("validation.interval=0", "checkpoint.enabled=false", "metrics.log_every=1", "run.name=losses"),
    ]
    share = [f"train.local_batch_size={ROWS * tensor // RANKS}", f"train.global_batch_size={ROWS}"]
    with tempfile.TemporaryDirectory(prefix="plait-families-") as scratch:
        start = [sys.executable, "-m", "plait", "train", *layout, *asked, *settings, *share]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(start, cwd=scratch, env=env, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            return (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
        rows = metrics.read(Path(scratch) / "runs" / "losses" / metrics.FILE)
        return {row["step"]: row["loss"] for row in rows if "loss" in row}


def compared(family: str, wanted: dict[int, float], steps: int, asked: list[str]) -> None:
    """Print a row for each layout."""
    for name, layout in LAYOUTS.items():
        found = on_ranks(layout, steps, asked)
        if isinstance(found, str):
            print(f"| {family} | {name} | {'no experts' if 'finds no experts' in found else found} | |", flush=True)
            continue
        apart = [abs(found[step] - loss) for step, loss in wanted.items()]
        equal = sum(round(found[step], 4) == round(loss, 4) for step, loss in wanted.items())
        ends = f"{found[1]:.4f}, {found[steps]:.4f}"
        print(f"| {family} | {name} | {ends} | {max(apart):.1e} | {equal} of {steps} |", flush=True)


def turns(families: dict[str, list[str]], beside: str, cycles: int, steps: int) -> None:
    """Print tokens per second of both in one process."""
    names = ("plait", beside)
    speeds: dict[tuple[str, str], list[float]] = {(family, name): [] for family in families for name in names}
    for cycle in range(-1, cycles):
        for key in random.Random(cycle).sample([*speeds], len(speeds)):
            found = speed(run(key[1], steps, False, families[key[0]]), ROWS * SEQ_LEN)
            print(f"cycle {cycle}, {', '.join(key)}: {found:,.0f} tokens per second", flush=True)
            if cycle >= 0:
                speeds[key].append(found)
    print(
        f"\n| family | plait, tokens per second | {beside}, tokens per second | plait / {beside} |\n|---|---|---|---|"
    )
    for family in families:
        ours, theirs = (speeds[family, name] for name in names)
        rates = " | ".join(f"{statistics.median(each):,.0f}" for each in (ours, theirs))
        print(f"| {family} | {rates} | {ratio(ours, theirs)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all, if none is named")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--cycles", type=int, default=0, help="turns of each in one process that count")
    parser.add_argument("--beside", choices=("trainer", "bare"), default="trainer")
    parser.add_argument("--no-losses", action="store_true", help="only the speed")
    asked = parser.parse_args()
    command(asked.beside)  # makes its environment
    print(f"{about()}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="plait-families-") as scratch:
        folder = Path(scratch)
        chosen = {
            name: overrides(saved(folder, name), folder / "cache", asked.dtype) for name in asked.families or FAMILIES
        }
        if not asked.no_losses:
            print(f"| family | on {RANKS} ranks | loss, first and last | largest difference | equal in four decimals |")
            print("|---|---|---|---|---|")
            for family, given in chosen.items():
                compared(family, run(asked.beside, asked.steps, False, given).losses, asked.steps, given)
        if asked.cycles:
            turns(chosen, asked.beside, asked.cycles, asked.steps)


if __name__ == "__main__":
    main()
