"""The shipped recipes train a folder of transformers: the steps, rates and sizes are those that they promise."""

import pytest

from plait.check.prepare import HIGHEST_RATE, rate_of_a_toy
from plait.contract.config import Config
from plait.host import compose
from tests.helpers.chats import CHATS, VOCAB, tokenizer_in, written

# the sizes of a tiny model, and a batch for it; all else is the recipe's
TINY = ("train.seq_len=144", "train.global_batch_size=8", "model=transformers", "model.path=model")
CHAT = ("data=chat", "data.path=chats.jsonl", "data.validation_fraction=0.1", "validation.batches=1")


@pytest.fixture
def folder(plait_project):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).save_pretrained("model")
    written(plait_project.path / "chats.jsonl", CHATS)
    return tokenizer_in(plait_project.path / "model")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("recipe", "more", "epochs", "rates"),  # rates: (of the first step, of the last one)
    [
        pytest.param("sft", CHAT, 2, (5e-6, 0.0), marks=SLOW),
        pytest.param("lora", CHAT, 3, (2e-4, 2e-4), marks=SLOW),
        pytest.param("pretrain", ("data=stdlib", "train.steps=2"), None, (1.5e-7, 3e-7), marks=SLOW),
    ],
)
def test_a_recipe_trains_a_folder_of_transformers(recipe, more, epochs, rates, folder, plait_project):
    done = plait_project("train", f"+recipe={recipe}", *TINY, *more, "run.name=a", ranks=1)
    assert done.code == 0, done.err
    assert "optimizer: lr=" not in done.out
    rows = plait_project.rows("a")
    assert (rows[0]["lr"], rows[-1]["lr"]) == pytest.approx(rates)
    if epochs:
        assert epochs <= rows[-1]["epoch"] < epochs + rows[0]["epoch"]


@pytest.mark.parametrize("recipe", ["sft", "lora", "pretrain"])
def test_of_a_recipe_each_value_can_be_given(recipe):
    config = compose([f"+recipe={recipe}", "optimizer.lr=1e-5", "train.seq_len=32", "train.epochs=null"])
    assert (config.optimizer["lr"], config.train.seq_len, config.train.epochs) == (1e-5, 32, None)
    assert (config.precision.param, config.precision.storage) == ("bfloat16", "float32")


def test_adapters_of_the_recipe_stand_beside_other_strategies():
    config = compose(["+recipe=lora", "strategy=[lora,fsdp2]", "strategy.lora.rank=8"])
    assert config.strategy.keys() == {"lora", "fsdp2"}
    assert (config.strategy["lora"]["rank"], config.strategy["lora"]["targets"]) == (8, ["embed"])


ADAM = "torch.optim.AdamW"


@pytest.mark.parametrize(
    ("start", "target", "lr", "told"),
    [
        ("base", ADAM, 3e-3, True),
        ("base", ADAM, HIGHEST_RATE, False),
        (None, ADAM, 3e-3, False),
        ("base", "torch.optim.SGD", 0.1, False),
        ("base", ADAM, None, False),
    ],
)
def test_the_rate_of_a_toy_is_told_if_a_run_starts_from_weights(start, target, lr, told):
    config = Config.of({"checkpoint": {"init_from": start}, "optimizer": {"_target_": target, "lr": lr}})
    assert (rate_of_a_toy(config) is not None) == told
