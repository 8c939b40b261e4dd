"""Rows with images under strategies, beside one process."""

import attrs
import pytest
import torch
from families import OfFamily, apart
from grid import BOUND, WHOLE_ROWS
from shown import EACH, VOCAB

from plait import IGNORE
from plait.testing import train as tried
from plait_transformers.build import decoder


@attrs.frozen
class WithImages(OfFamily):
    """A trial on rows in which images stand."""

    folder: str = ""
    images: str = ""
    steps: int = 2
    documents: bool = True

    def build(self):
        with torch.device("meta"):
            return decoder(path=self.folder, images=self.images, weights="init")

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(4, VOCAB, (8, 17), generator=generator)
        tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
        tokens[:, 3:7] = VOCAB + torch.arange(4)
        tokens[::2, 9:12] = VOCAB + 2 + torch.arange(3)
        labels[:, :6] = IGNORE
        return tokens, labels


def result(folder, seen, strategies):
    """Called on every rank."""
    return tried(WithImages(folder=folder, images=seen), strategies)


STRATEGIES = {
    "fsdp2": {"fsdp2": {}},
    "simplefsdp": {"simplefsdp": {}},
    **WHOLE_ROWS,
    "tensor_parallel x fsdp2": {**WHOLE_ROWS["tensor_parallel"], "fsdp2": {}},
    "context_parallel": {"context_parallel": {"degree": 2}, "fsdp2": {}},
}
ACT_ON_ROWS = ("gemma3", "qwen3_5", "qwen3_vl")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", EACH)
def test_under_strategies(kind, strategy, made, plait_ranks):
    folder, _, seen, _ = made(kind)
    given, world = (str(folder), str(seen)), 4 if " x " in strategy else 2
    if strategy == "context_parallel" and kind in ACT_ON_ROWS:
        with pytest.raises(Exception, match="mixes the tokens of a whole row") as caught:
            plait_ranks.run(result, *given, STRATEGIES[strategy], world=world)
        assert "PlaitError" in str(caught.value)
        return
    (one,) = plait_ranks.once(result, *given, {}, world=1)
    for answer in plait_ranks.run(result, *given, STRATEGIES[strategy], world=world):
        error, name = apart(answer, one)
        assert error < BOUND, name


def test_what_divides_the_sum_of_words_and_images_is_refused(made, plait_ranks):
    folder, _, seen, _ = made("llava")
    for strategies, said in {
        "tensor_parallel": "sequence_parallel=true: set strategy.tensor_parallel.sequence_parallel=false",
        "pipeline": "pipeline",
    }.items():
        with pytest.raises(Exception, match=said) as caught:
            plait_ranks.run(result, str(folder), str(seen), {strategies: {"degree": 2}}, world=2)
        assert "PlaitError" in str(caught.value)
