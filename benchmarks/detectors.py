"""Public bugs in the releases that had them, and what `plait verify` says: python benchmarks/detectors.py [NAME]

Each release gets an environment of its own in build/detectors, made with pip once: with a network. The files that are
compared are those of benchmarks/detected. A row says whether the first wrong parameter and the pattern are those that
the report tells of, and the seconds of the whole command, start and imports among them, on this machine's cores.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

import attrs
from machine import about

HERE = Path(__file__).parent
FOLDER = HERE.parent / "build" / "detectors"


@attrs.frozen
class Bug:
    """report: where it was told. needs: what pip installs. target: in benchmarks/detected. question, parameter, kind:
    what must be said of it."""

    report: str
    needs: tuple[str, ...]
    target: str
    question: str
    parameter: str
    kind: str


BUGS = [
    Bug(
        *("torchtitan #2318, #2323", ("torchtitan==0.2.2", "triton"), "titan_ddp.py::ddp"),
        *("gradients", "tok_embeddings.weight", "divided"),
    ),
    Bug(
        *("Megatron-LM #7452, finding 1", ("megatron-core==0.16.1",), "megatron_bugs.py::label_smoothing"),
        *("gradients", "embedding.word_embeddings.weight", "other"),
    ),
    Bug(
        *("NeMo RL #3716, Megatron-LM #7452, finding 11", ("megatron-core==0.16.1",), "megatron_bugs.py::qk_norm"),
        *("gradients", "decoder.layers.0.self_attention.q_layernorm.weight", "not summed"),
    ),
    Bug(
        *("transformers, plans before `replicated_with_grad_allreduce`",),
        *(("transformers==4.57.1", "accelerate==1.11.0"), "transformers_tp.py::qwen3"),
        *("gradients", "model.layers.0.self_attn.q_norm.weight", "not summed"),
    ),
    Bug(
        *("transformers #34191, #34242",),
        ("transformers==4.45.2", "accelerate==0.34.2", "datasets==3.0.0", "huggingface_hub<0.30"),
        *("transformers_trainer.py::trainer", "unequal", "model.embed_tokens.weight", "own counts"),
    ),
]


def python(needs: tuple[str, ...]) -> Path:
    """The interpreter of an environment with these packages, beside those of this one."""
    at = FOLDER / needs[0].replace("==", "-")
    found, mark = at / "bin" / "python", at / "made-of"
    if not mark.exists():
        print(f"environment: {at}", file=sys.stderr, flush=True)
        venv.create(at, clear=True, with_pip=True)
        site = at / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (site / "here.pth").write_text(here, encoding="utf-8")
        subprocess.run([found, "-m", "pip", "install", "-q", "torch==2.13.0", *needs], check=True)
        mark.write_text("\n".join(needs), encoding="utf-8")
    return found


def row(bug: Bug) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [python(bug.needs), "-W", "ignore", "-m", "plait", "verify", bug.target, "--json", found]
        started = time.monotonic()
        done = subprocess.run(command, cwd=HERE / "detected", capture_output=True, text=True, encoding="utf-8")
        seconds = time.monotonic() - started
        first = json.loads(found.read_text(encoding="utf-8"))["first"] if found.exists() else None
    if first is None:
        raise SystemExit(f"{bug.target}: {done.stdout}{done.stderr}")
    said = (first["question"], first["parameter"], first["cause"]["kind"])
    named = "yes" if said == (bug.question, bug.parameter, bug.kind) and bug.kind != "other" else "parameter"
    named = named if said[:2] == (bug.question, bug.parameter) else "no"
    released = " ".join(bug.needs[:1])
    told = f"`{said[1]}`: {first['cause']['sentence']}"
    return f"| {bug.report} | {released} | yes | {named} | {seconds:.0f} | {told} |"


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [bug for bug in BUGS if not sys.argv[1:] or sys.argv[1] in bug.target]
    print(f"{about()}\n", flush=True)
    print("| report | release | found | named | seconds | what `plait verify` says |")
    print("|---|---|---|---|--:|---|", flush=True)
    for bug in chosen:
        print(row(bug), flush=True)


if __name__ == "__main__":
    main()
