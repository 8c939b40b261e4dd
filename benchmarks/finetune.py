"""Fine-tuning by Plait beside transformers' own Trainer: python benchmarks/finetune.py [--device cuda] [overrides]

A folder of transformers (a small llama with random weights) is trained on made conversations, with loss on the answers
alone, by `plait train`, by a bare loop of torch and by transformers' Trainer, in turns and in random order. All get the
same rows of packed conversations. The bare loop runs twice per cycle, which shows how much equal runs differ. Printed
are tokens per second between the first step and the last but one, and how far losses are apart at the worst step.
With `--device cuda` the llama has the sizes of Llama 3.2 1B, all compute in bfloat16, and Plait runs compiled too.
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from first_step import ratio
from machine import about
from peers import command, run, speed

NAMES = ("trainer", "plait", "bare", "bare again", "plait, compiled")
VOCAB = 512  # of the tokenizer
SIZES: dict[str, dict[str, int]] = {
    "cpu": {
        **{"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 768},
        **{"num_hidden_layers": 4, "num_attention_heads": 8},
    },
    "cuda": {
        **{"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    },
}
SEQ_LEN, ROWS = {"cpu": 256, "cuda": 2048}, {"cpu": 8, "cuda": 4}


def conversation(number: int) -> list[dict[str, str]]:
    """A sum is asked, and answered step by step: no two are alike, and they are of unequal length."""
    drawn = random.Random(number)
    terms = [drawn.randrange(1, 1000) for _ in range(2 + number % 6)]
    said, total = [], 0
    for term in terms:
        said.append(f"{total} and {term} is {total + term}")
        total += term
    asked = f"What is the sum of {', '.join(map(str, terms))}?"
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": f"{'; '.join(said)}. The sum is {total}."},
    ]


def made(folder: Path, conversations: int, device: str) -> list[str]:
    """Write model, tokenizer and conversations into `folder`; returns the overrides that train on them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.helpers.chats import tokenizer_in, written

    chats = [conversation(number) for number in range(conversations)]
    written(folder / "chats.jsonl", chats)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES[device])).save_pretrained(folder / "model")
    model = tokenizer_in(folder / "model", chats, VOCAB)
    return [
        *("model=transformers", f"model.path={model}", "data=chat", f"data.path={folder / 'chats.jsonl'}"),
        *(f"data.tokenizer={model}", f"data.cache_dir={folder / 'cache'}", "data.validation_fraction=0"),
        *(f"train.seq_len={SEQ_LEN[device]}", f"train.local_batch_size={ROWS[device]}", "optimizer.lr=0.0003"),
        *("schedule.decay_steps=0", f"precision.param={'float32' if device == 'cpu' else 'bfloat16'}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5, help="turns of each that count")
    parser.add_argument("--warm-up", type=int, default=1, help="turns before that do not")
    parser.add_argument("--steps", type=int, default=20, help="of each run, at least 3")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="bare is always there")
    parser.add_argument("overrides", nargs="*", help="of plait train, for all")
    asked, more = parser.parse_known_args()
    if asked.steps < 3:
        parser.error("--steps must be at least 3")
    usual = NAMES if asked.device == "cuda" else NAMES[:-1]  # compiling takes longer than the rest on a CPU
    names = [name for name in NAMES if name in {*(asked.only or usual), "bare"}]
    for name in names:
        command(name)  # makes its environment
    print(f"{about()}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="plait-finetune-") as scratch:
        overrides = [*made(Path(scratch), asked.conversations, asked.device), *asked.overrides, *more]
        from plait.host import compose

        train = compose(overrides).train
        tokens = train.local_batch_size * train.seq_len
        speeds: dict[str, list[float]] = {name: [] for name in names}
        losses = {}
        for cycle in range(-asked.warm_up, asked.cycles):
            for name in random.Random(cycle).sample(names, len(names)):
                lines = run(name, asked.steps, False, overrides, asked.device)
                losses[name] = lines.losses
                found = speed(lines, tokens)
                print(f"cycle {cycle}, {name}: {found:,.0f} tokens per second", flush=True)
                if cycle >= 0:
                    speeds[name].append(found)
    print("\n| | tokens per second | relative to bare | loss, first and last | largest difference to plait's loss |")
    print("|---|---|---|---|---|")
    ours = losses.get("plait", losses["bare"])
    for name in names:
        apart = max(abs(loss - ours[step]) for step, loss in losses[name].items())
        ends = f"{losses[name][1]:.4f}, {losses[name][asked.steps]:.4f}"
        rate = f"{statistics.median(speeds[name]):,.0f} | {ratio(speeds[name], speeds['bare'])}"
        print(f"| {name} | {rate} | {ends} | {apart:.4f} |")


if __name__ == "__main__":
    main()
