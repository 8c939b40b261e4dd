"""Speed of preparing text, beside the bare library `tokenizers`: python benchmarks/tokenising.py [--mb N] [--rounds N]

It makes documents of invented words in JSON lines, and trains a tokenizer on some of them. Then, in turns and each in a
new process: Plait prepares the files (reads and digests them, tokenises, and writes the cache), and the library encodes
the same documents from memory with its own threads and keeps nothing, by `encode_batch` and by `encode_batch_fast`,
which leaves out where each token lies in the text. The ratio is Plait's speed to the library's in the same round.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import about

FILES = 8
BATCH = 8_000_000  # bytes that the library gets at once: the fastest of 2, 8 and all
WAYS = ("plait", "encode_batch", "encode_batch_fast")


def write(folder: Path, megabytes: int) -> None:
    """Write the documents and the tokenizer."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw = np.random.default_rng(0)
    onsets, vowels = "b c d f g h l m n p r s t v w st tr ch", "a e i o u ai er on"
    syllables = [onset + vowel for onset in onsets.split(" ") for vowel in vowels.split(" ")]
    words = np.array(["".join(draw.choice(syllables, size=draw.integers(1, 5))) for _ in range(50_000)])

    def document() -> str:
        length = int(np.clip(draw.lognormal(5.5, 1.0), 20, 5000))
        return " ".join(words[np.minimum(draw.zipf(1.2, length), len(words)) - 1])

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator((document() for _ in range(1000)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    for number in range(FILES):
        with (folder / f"part-{number}.jsonl").open("w", encoding="utf-8") as file:
            while file.tell() < megabytes * 1e6 / FILES:
                file.write(json.dumps({"text": document()}) + "\n")


def plait(folder: Path) -> float:
    """Seconds that Plait takes to prepare all of it."""
    from plait_data.text import Text

    with tempfile.TemporaryDirectory(dir=folder) as cache:
        source = Text(path=f"{folder}/*.jsonl", tokenizer=str(folder / "tokenizer.json"), cache_dir=cache)
        source.check(seq_len=1, vocab_size=None)  # loads the tokenizer
        began = time.perf_counter()
        source.prepare(lambda line: None)
        return time.perf_counter() - began


def library(folder: Path, way: str) -> float:
    """Seconds that the library takes to encode all of it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    batches: list[list[str]] = [[]]
    for file in sorted(folder.glob("*.jsonl")):
        size = 0
        for line in file.open(encoding="utf-8"):
            batches[-1].append(json.loads(line)["text"])
            size += len(line)
            if size >= BATCH:
                batches.append([])
                size = 0
    began = time.perf_counter()
    for batch in batches:
        getattr(tokenizer, way)(batch, add_special_tokens=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=64, help="megabytes of JSON lines")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        way, folder = asked.one[0], Path(asked.one[1])
        seconds = plait(folder) if way == "plait" else library(folder, way)
        spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        print(json.dumps([seconds, max(one.ru_maxrss for one in spent) / 1024]))
        return
    with tempfile.TemporaryDirectory(prefix="plait-tokenising-") as scratch:
        write(Path(scratch), asked.mb)
        size = sum(file.stat().st_size for file in Path(scratch).glob("*.jsonl")) / 1e6
        print(f"{about()}\n{size:.0f} MB of JSON lines in {FILES} files, {asked.rounds} rounds\n")
        speeds: dict[str, list[float]] = {way: [] for way in WAYS}
        peaks = dict.fromkeys(WAYS, 0.0)
        for number in range(asked.rounds):
            for way in WAYS if number % 2 else WAYS[::-1]:
                command = [sys.executable, __file__, "--one", way, scratch]
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ, encoding="utf-8"
                )
                seconds, peak = json.loads(done.stdout)
                speeds[way].append(size / seconds)
                peaks[way] = max(peaks[way], peak)
    print("| | MB per second | ratio of Plait to it | peak of its largest process, MiB |\n|---|---|---|---|")
    for way in WAYS:
        ratios = [a / b for a, b in zip(speeds["plait"], speeds[way], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {way} | {statistics.median(speeds[way]):.2f} | {spread} | {peaks[way]:.0f} |")


if __name__ == "__main__":
    main()
