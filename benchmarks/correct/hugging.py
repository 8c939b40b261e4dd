"""transformers' tensor parallelism and its Trainer, and Accelerate."""

import os
import tempfile

import torch
from mine import Model, loss
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from plait.testing import Comparison, Parallel, random_tokens

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen3": Qwen3Config(**SIZES, head_dim=8)}
CONFIGS["mixtral"] = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)


def divided(name):
    path = os.path.join(tempfile.gettempdir(), f"plait-correct-{name}")
    if not os.path.exists(path):
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(path)

    def build(**options):
        return AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager", **options)

    def parallelize(model, mesh):
        return build(dtype=model.dtype, distributed_config=DistributedConfig(tp_size=2))

    return Comparison(build=build, parallelize=parallelize, batch=random_tokens(vocab=64), mesh={"tp": 2})


def llama():
    return divided("llama")


def qwen3():
    return divided("qwen3")


def mixtral():
    return divided("mixtral")


def forget():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerate_ddp(model, mesh):
    from accelerate import Accelerator

    forget()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def clip(largest):
        return accelerator.clip_grad_norm_(model.parameters(), largest)

    return Parallel(model, optimizer, backward=accelerator.backward, clip=clip)


def accelerate():
    batch = random_tokens(vocab=64, shifted=True)
    return Comparison(build=Model, parallelize=accelerate_ddp, batch=batch, loss=loss, mesh={"dp": 2})


def whole():
    return AutoModelForCausalLM.from_config(CONFIGS["llama"])


def trained(model, mesh):
    """By the Trainer's own step, which counts the labels of all ranks and micro-batches."""
    forget()
    trainers = {}

    def trainer(parts):
        if parts not in trainers:
            folder = tempfile.mkdtemp()
            options = {"output_dir": folder, "use_cpu": True, "report_to": [], "gradient_accumulation_steps": parts}
            made = Trainer(model=model, args=TrainingArguments(**options))
            trainers[parts] = made, made.accelerator.prepare(model)
        return trainers[parts]

    def run(batches):
        (made, wrapped), summed = trainer(len(batches)), 0.0
        made.current_gradient_accumulation_steps = len(batches)
        count = torch.tensor(batches[0].total)
        for i, batch in enumerate(batches, 1):
            made.accelerator.gradient_state._set_sync_gradients(i == len(batches))
            last = torch.enable_grad() if i == len(batches) else made.accelerator.no_sync(wrapped)
            with last:
                summed += float(made.training_step(wrapped, dict(batch), num_items_in_batch=count))
        return summed

    return Parallel(model, run=run)


def trainer():
    off = dict.fromkeys(["saved", "norm"], "the Trainer's loop does it")
    batch = random_tokens(vocab=64)
    return Comparison(build=whole, parallelize=trained, batch=batch, mesh={"dp": 2}, off=off)
