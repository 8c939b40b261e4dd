"""Public bugs in the releases that had them, and what `plait verify` says: detectors.py [NAME] [--write]

Each release gets an environment of its own in build/detectors, made with pip once: with a network. The files that are
compared are those of benchmarks/detected. A row says whether the first wrong parameter and the pattern are those that
the report tells of, and the seconds of the whole command, start and imports among them, on this machine's cores.
--write puts the rows into docs/verified-bugs.md.
"""

import os
import sys
from pathlib import Path

import attrs
import tables
from environments import TORCH, verified
from machine import about

HERE = Path(__file__).parent / "detected"
HEAD = "| report | release | found | named | seconds | what `plait verify` says | the project's own tests |"
HUGGING, TITAN = "https://github.com/huggingface/transformers", "https://github.com/pytorch/torchtitan"
MEGATRON = "[Megatron-LM #7452](https://github.com/NVIDIA/Megatron-LM/issues/7452)"


@attrs.frozen
class Bug:
    """report: where it was told. needs: what pip installs. target: in benchmarks/detected. question, parameter, kind:
    what must be said of it. tests: what the project's own tests compare, and why they miss it."""

    report: str
    needs: tuple[str, ...]
    target: str
    question: str
    parameter: str
    kind: str
    tests: str
    release: str = attrs.field(default=attrs.Factory(lambda self: self.needs[0], takes_self=True))


BUGS = [
    Bug(
        *(
            f"[torchtitan #2318]({TITAN}/issues/2318), [torchtitan #2323]({TITAN}/pull/2323)",
            ("torchtitan==0.2.2", "triton"),
            "titan_ddp.py::ddp",
        ),
        *("gradients", "tok_embeddings.weight", "divided"),
        "compare, on 8 GPUs, the loss of the first step, which no gradient has changed; under DDP they run and compare "
        "nothing",
    ),
    Bug(
        *(f"{MEGATRON}, finding 1", ("megatron-core==0.16.1",), "megatron_bugs.py::label_smoothing"),
        *("gradients", "embedding.word_embeddings.weight", "part of the vocabulary"),
        "call the loss without label smoothing, and compare it rounded to integers",
    ),
    Bug(
        *(
            "[NeMo RL #3716](https://github.com/NVIDIA-NeMo/RL/issues/3716), "
            f"{MEGATRON}, finding 11, as a loop without `finalize_model_grads`",
            ("megatron-core==0.16.1",),
            "megatron_bugs.py::qk_norm",
        ),
        *("gradients", "decoder.layers.0.self_attention.q_layernorm.weight", "not summed"),
        "compare norms of all gradients on one and two tensor ranks of a Llama, which has no such weights (NeMo RL); "
        "set all gradients to 1, call the sum, and compare nothing after it (Megatron-LM)",
    ),
    Bug(
        *("transformers, plans before `replicated_with_grad_allreduce`",),
        *(("transformers==4.57.1", "accelerate==1.11.0"), "transformers_tp.py::qwen3"),
        *("gradients", "model.layers.0.self_attn.q_norm.weight", "not summed"),
        "compare a predicted token, a text, and the files of a Llama, which has no such weights: no gradient",
    ),
    Bug(
        *(f"[transformers #34191]({HUGGING}/pull/34191), [transformers #34242]({HUGGING}/issues/34242)",),
        ("transformers==4.45.2", "accelerate==0.34.2", "datasets==3.0.0", "huggingface_hub<0.30"),
        *("transformers_trainer.py::trainer", "unequal", "model.embed_tokens.weight", "own counts"),
        "compare the weights of a regression with and without accumulation, where each row has one label",
    ),
    Bug(
        *(f"{MEGATRON}, finding 2", ("megatron-core==0.16.1",), "megatron_bugs.py::gathered_logits"),
        *("gradients", "embedding.word_embeddings.weight", "softmax counted"),
        "those of the model give it no labels, and one that gathers logits infers",
    ),
    Bug(
        *(f"[torchtitan #2206]({TITAN}/pull/2206)", ("torchtitan==0.2.0", "triton"), "titan_loss.py::fsdp"),
        *("unequal", "tok_embeddings.weight", "own counts"),
        "none of the loss at that release; the change that mends it brought one of the function in one process, which "
        "passes",
    ),
    Bug(
        *(
            "[Lightning #18086](https://github.com/Lightning-AI/pytorch-lightning/issues/18086)",
            ("pytorch-lightning==2.5.5",),
            "lightning_manual.py::manual",
        ),
        *("gradients", "tokens.weight", "not summed"),
        "none at that release: the change that mends it brought one",
    ),
    Bug(
        *(
            f"[transformers #48687]({HUGGING}/issues/48687)",
            ("transformers==5.15.0", "accelerate==1.12.0"),
            "transformers_experts.py::qwen3",
        ),
        *("gradients", "model.layers.1.mlp.gate.weight", "masked places"),
        "call backward under expert parallelism, and compare the loss alone; run: passed",
    ),
    Bug(
        *("none known: [below](#ready-to-be-reported)", ("accelerate==1.15.0", "lightning-fabric==2.6.6")),
        *("transformers_accumulation.py::qwen3", "accumulation"),
        *("model.layers.0.self_attn.q_norm.weight", "reduced again"),
        "compare the gradients of one backward, never of two",
        release="transformers==5.23.0",
    ),
]


def row(bug: Bug) -> str:
    """A row of the table."""
    done = verified(bug.needs, bug.target, HERE)
    if done.found is None or done.found["first"] is None:
        raise SystemExit(f"{bug.target}: {done.printed}")
    first = done.found["first"]
    places = {first["parameter"]: first["cause"], first["last"]: first["last_cause"]}
    cause = places.get(bug.parameter)
    right = first["question"] == bug.question and cause is not None
    named = "yes" if right and cause["kind"] == bug.kind else "parameter" if right else "no"
    parameter, cause = (bug.parameter, cause) if cause else (first["parameter"], first["cause"])
    told = f"`{parameter}`: {cause['sentence']}"
    return f"| {bug.report} | {bug.release} | yes | {named} | {done.seconds:.0f} | {told} | {bug.tests} |"


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [each for each in sys.argv[1:] if each != "--write"]
    chosen = [bug for bug in BUGS if not names or names[0] in bug.target]
    print(f"{about()}\n\n{HEAD}\n|---|---|---|---|--:|---|---|", flush=True)
    rows, loads = [], []
    for bug in chosen:
        loads.append(os.getloadavg()[0])
        rows.append(row(bug))
        print(rows[-1], flush=True)
    if "--write" in sys.argv:
        said = tables.measured(TORCH.removeprefix("torch=="), loads) if chosen == BUGS else ""
        tables.write(tables.PAGE, HEAD, 2, rows, said)


if __name__ == "__main__":
    main()
