"""Words of other tools are answered with what they are called here, and `plait train --help` explains every key."""

import pytest

from plait.compose.foreign import words
from plait.compose.keys import of_a_run
from plait.host import compose
from plait.testing import raises_about

SAID = {  # argument -> (the key of the error, what to write)
    "lr=1e-3": ("lr", "optimizer.lr"),
    "optimizer.learning_rate=1e-3": ("optimizer.learning_rate", "optimizer.lr"),
    "batch_size=8": ("batch_size", "train.local_batch_size"),
    "train.batch_size=8": ("train.batch_size", "train.local_batch_size"),
    "num_train_epochs=3": ("num_train_epochs", "train.epochs"),
    "seed=3": ("seed", "train.seed"),  # not sweep, which is spelt like it
    "interval=3": ("interval", "validation.interval or checkpoint.interval"),
    "--learning-rate=1e-3": ("--learning-rate", "optimizer.lr"),
    "--steps 100": ("--steps", "train.steps"),
    "--config mine.yaml": ("--config", "+recipe=NAME, for your own file conf/recipe/NAME.yaml"),
}


@pytest.mark.parametrize("argument", SAID)
def test_a_word_of_another_tool(plait_project, argument):
    key, here = SAID[argument]
    done = plait_project("train", *argument.split())
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert (done.error.key, " or ".join(done.error.fits)) == (key, here)
    assert f"here it is {here}" in done.err


def test_a_mistyped_key_is_corrected_within_its_node():
    with raises_about("train.stpes", fits=("steps",)) as caught:
        compose(["train.stpes=3"])
    assert str(caught.value).endswith("did you mean 'steps'?")


def test_what_the_table_names_exists():
    others = [word for each in words().values() for word in each]
    assert sorted(others) == sorted(set(others)), "a word means one thing"
    known = {key.path for key in of_a_run()}
    named = [part for here in words() for part in here.partition(",")[0].split() if not part.startswith("+")]
    strategies = {part[len("strategy=[") : -1] for part in named if part.startswith("strategy=[")}
    for data in ("text", "hf"):
        chosen = [f"data={data}", "model=transformers", f"strategy=[{','.join(sorted(strategies))}]"]
        known |= _paths(compose(chosen).plain())
    assert {part.partition("=")[0] for part in named} <= known


def _paths(node, before=""):
    """`a` and `a.b` of {"a": {"b": 1}}."""
    below = (_paths(value, f"{before}{key}.") for key, value in node.items() if isinstance(value, dict))
    return {f"{before}{key}" for key in node}.union(*below)


def test_help_explains_every_key(plait_project):
    done = plait_project("train", "--help")
    assert (done.code, done.err) == (0, "")
    said = " ".join(done.out.split())
    for key in of_a_run():
        if key.comment and not key.path.startswith("hydra"):
            assert f"{key.path}{f'={key.value}' if key.value else ''} {' '.join(key.comment.split())}" in said
    assert said.count("plait train ") >= 6
    assert "strategy: " in done.out
