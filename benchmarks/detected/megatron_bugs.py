"""Megatron-core 0.16.1: label smoothing over a rank's part of the vocabulary; whole logits in the loss for a part;
norms of queries and keys, whose gradients only `finalize_model_grads` sums, which a loop of one's own may leave out."""

import contextlib

import attrs
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from plait.testing import Comparison, Parallel, random_tokens

torch.cuda.current_device = lambda: "cpu"  # where Megatron makes its buffers
tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()  # there is no dropout

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "normalization": "RMSNorm"}
OFF = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "gradient_accumulation_fusion": False}
OFF |= {"masked_softmax_fusion": False, "bias_dropout_fusion": False}


def build(tp=1, whole_logits=False, **more):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    config = TransformerConfig(**{**SIZES, **OFF, **more}, tensor_model_parallel_size=tp, use_cpu_initialization=True)
    layers = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    options = {"max_sequence_length": 16, "position_embedding_type": "rope", "parallel_output": not whole_logits}
    return GPTModel(config, layers, vocab_size=64, **options)


def parallelize(model, mesh):
    dtype, norms = next(model.parameters()).dtype, model.config.qk_layernorm
    model = build(mesh["tp"].size(), not model.parallel_output, qk_layernorm=norms).to(dtype)
    divided = [(n, p) for n, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)]
    return Parallel(model, shards={name: (param.partition_dim, "tp") for name, param in divided})


def loss(model, batch):
    tokens, labels = batch["input_ids"], batch["labels"]
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    hidden = torch.ones(1, 1, length, length).tril() < 0.5
    losses = model(tokens, positions, hidden, labels=labels.clamp(min=0))
    return (losses * (labels >= 0)).sum() / batch.total


def tp():
    batch = random_tokens(vocab=64, shifted=True)
    return Comparison(build=build, parallelize=parallelize, batch=batch, loss=loss, mesh={"tp": 2})


def smoothed(model, batch):
    tokens, labels = batch["input_ids"], batch["labels"]
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    hidden = torch.ones(1, 1, length, length).tril() < 0.5
    logits = model(tokens, positions, hidden)
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels.clamp(min=0), label_smoothing=0.1)
    return (losses * (labels >= 0)).sum() / batch.total


def label_smoothing():
    return attrs.evolve(tp(), loss=smoothed)


def with_norms():
    return build(qk_layernorm=True)


def qk_norm():
    return attrs.evolve(tp(), build=with_norms)


def with_whole_logits():
    return build(whole_logits=True)


def gathered_logits():
    return attrs.evolve(tp(), build=with_whole_logits)
