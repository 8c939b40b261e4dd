"""The Trainer of an older transformers under DDP: each rank and micro-batch divides by its own labels."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from plait.testing import Comparison, Parallel, random_tokens

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4)


def build():
    return AutoModelForCausalLM.from_config(CONFIG)


def parallelize(model, mesh):
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    arguments = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "report_to": []}
    trainers = {}

    def trainer(parts):
        if parts not in trainers:
            made = Trainer(model=model, args=TrainingArguments(**arguments, gradient_accumulation_steps=parts))
            made.accelerator.gradient_accumulation_steps = parts
            trainers[parts] = made, made.accelerator.prepare(model)
        return trainers[parts]

    def run(batches):
        (made, wrapped), summed = trainer(len(batches)), 0.0
        for i, batch in enumerate(batches, 1):
            with torch.enable_grad() if i == len(batches) else made.accelerator.no_sync(wrapped):
                summed += float(made.training_step(wrapped, dict(batch)))
        return summed

    return Parallel(model, run=run)


def loss(model, batch):
    return model(**batch).loss  # of one process, whole


def trainer():
    off = dict.fromkeys(["saved", "norm", "recomputation", "frozen", "steps"], "gradients are what is asked here")
    given = {"build": build, "parallelize": parallelize, "batch": random_tokens(vocab=64), "loss": loss}
    return Comparison(**given, mesh={"dp": 2}, off=off)
