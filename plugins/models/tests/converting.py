"""Small models and their weights in folders, for the tests of `plait convert`."""

import torch
from safetensors.torch import load_file, save_file

from plait.parallel.initialize import initialise, materialise
from plait.parallel.state import canonical_state, weights
from plait_testing.models import llama3, moe, qk_norm

MODELS = {
    "llama3": llama3,
    "llama3 tied": lambda: llama3(tie_embeddings=True),
    "qwen3": qk_norm,
    "qwen3 experts": lambda: qk_norm(ffn_dim=16, n_experts=8, top_k=2),
    "deepseek": moe,
}


def real(make):
    with torch.device("meta"):
        model = make()
    materialise(model, "cpu")
    initialise(model, model.spec(), seed=0)
    return model


def state_of(model):
    return weights(canonical_state(model)[0])


def written(make, path):
    """The model's weights in a folder, as `export` names them."""
    model = real(make)
    path.mkdir()
    save_file(state_of(model), path / "model.safetensors")
    return model


def whole(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
