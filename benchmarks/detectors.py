"""Public bugs in the releases that had them, and what `plait verify` says: python benchmarks/detectors.py [NAME]

Each release gets an environment of its own in build/detectors, made with pip once: with a network. The files that are
compared are those of benchmarks/detected. A row says whether the first wrong parameter and the pattern are those that
the report tells of, and the seconds of the whole command, start and imports among them, on this machine's cores.
"""

import os
import sys
from pathlib import Path

import attrs
from environments import verified
from machine import about

HERE = Path(__file__).parent / "detected"
UNCLEAR = ("other", "copies differ")  # a parameter is named, and no pattern


@attrs.frozen
class Bug:
    """report: where it was told. needs: what pip installs. target: in benchmarks/detected. question, parameter, kind:
    what must be said of it. tests: what the project's own tests say of it, as far as that was read."""

    report: str
    needs: tuple[str, ...]
    target: str
    question: str
    parameter: str
    kind: str
    tests: str = "not looked into"


BUGS = [
    Bug(
        *("torchtitan #2318, #2323", ("torchtitan==0.2.2", "triton"), "titan_ddp.py::ddp"),
        *("gradients", "tok_embeddings.weight", "divided"),
    ),
    Bug(
        *("Megatron-LM #7452, finding 1", ("megatron-core==0.16.1",), "megatron_bugs.py::label_smoothing"),
        *("gradients", "embedding.word_embeddings.weight", "part of the vocabulary"),
        "call the loss without label smoothing, and compare it rounded to integers",
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
    Bug(
        *("Megatron-LM #7452, finding 2", ("megatron-core==0.16.1",), "megatron_bugs.py::gathered_logits"),
        *("gradients", "embedding.word_embeddings.weight", "softmax counted"),
    ),
    Bug(
        *("torchtitan #2206", ("torchtitan==0.2.0", "triton"), "titan_loss.py::fsdp"),
        *("unequal", "tok_embeddings.weight", "own counts"),
    ),
    Bug(
        *("Lightning #18086", ("pytorch-lightning==2.5.5",), "lightning_manual.py::manual"),
        *("gradients", "tokens.weight", "not summed"),
        "none at that release: the change that mends it brought one",
    ),
    Bug(
        *("transformers #48687", ("transformers==5.15.0", "accelerate==1.12.0"), "transformers_experts.py::qwen3"),
        *("gradients", "model.layers.1.mlp.gate.weight", "masked places"),
        "compare gradients, of the default implementation of experts alone",
    ),
    Bug(
        *("none known: found by the set-ups of setups.py", ("accelerate==1.15.0", "lightning-fabric==2.6.6")),
        *("transformers_accumulation.py::qwen3", "accumulation"),
        *("model.layers.0.self_attn.q_norm.weight", "reduced again"),
        "compare the gradients of one backward, never of two",
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
    named = "yes" if right and cause["kind"] == bug.kind and bug.kind not in UNCLEAR else "parameter" if right else "no"
    parameter, cause = (bug.parameter, cause) if cause else (first["parameter"], first["cause"])
    released = " ".join(bug.needs[:1])
    told = f"`{parameter}`: {cause['sentence']}"
    return f"| {bug.report} | {released} | yes | {named} | {done.seconds:.0f} | {told} | {bug.tests} |"


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [bug for bug in BUGS if not sys.argv[1:] or sys.argv[1] in bug.target]
    print(f"{about()}\n", flush=True)
    print("| report | release | found | named | seconds | what `plait verify` says | the project's own tests |")
    print("|---|---|---|---|--:|---|---|", flush=True)
    for bug in chosen:
        print(row(bug), flush=True)


if __name__ == "__main__":
    main()
