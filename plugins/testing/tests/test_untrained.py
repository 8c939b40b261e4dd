"""A comparison of zero with zero is not taken for one that passed."""

import pytest

from plait.host import compose
from plait.testing import Layout, StrategySuite
from plait_testing import declared
from plait_testing.parity import untrained
from plait_testing.plugin import pytest_runtest_makereport
from plait_testing.trial import Trial, train
from plait_testing.verify import _unknown, plan

CODE = """
import attrs
from plait import MeshAxis, hookimpl


def ones(tensor, generator=None):
    return tensor.fill_(1)


class Adds:
    def forward(self, x):
        return super().forward(x) + FACTOR * self.extra


@attrs.define
class Ghost:
    '''Adds a parameter to the last norm.'''

    @hookimpl
    def extend(self, model, spec):
        import torch
        from plait import mix_in

        mix_in(model.norm, Adds)
        model.norm.extra = torch.nn.Parameter(torch.empty_like(model.norm.weight, device="meta"))
        axes, init = {"norm.extra": ("embed",)}, {"norm.extra": ones}
        return attrs.evolve(spec, axes=axes | dict(spec.axes), init=init | dict(spec.init))
"""
SMALL = (
    "model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48",
    "model.vocab_size=257", "train.seq_len=16", "strategy=[ghost,fsdp2]",
)  # fmt: skip


class Ghostly(StrategySuite):
    strategy = "ghost"
    layouts = {"two": Layout(2, {}, {"fsdp2": {}})}  # noqa: RUF012


@pytest.fixture
def ghost(install_ghost):
    """(factor, code) -> ranks under that strategy."""
    return lambda factor, code=CODE: install_ghost(code.replace("FACTOR", factor))


def test_the_suite_fails_if_it_saw_nothing_of_the_strategy(ghost):
    with pytest.raises(AssertionError, match=r"ghost changes only parameters .* says nothing of it: norm\.extra; give"):
        Ghostly().test_models_equal_one_process(ghost("0"), "llama3")


@pytest.mark.slow
def test_the_suite_passes_if_it_trains(ghost):
    suite = Ghostly()
    suite.test_models_equal_one_process(ghost("1"), "llama3")
    assert suite.untrained == ()


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "names"), [("0", ("norm.extra",)), ("1", ())])
def test_verify_too(ghost, tmp_path, factor, names):
    ranks, checked = ghost(factor), plan(compose(list(SMALL)))
    trial = declared.OfRun(config=checked.config, vocab=257, data_ranks=checked.layout.count("batch"), last=True)
    strategies = dict(checked.config.strategy)
    ranks.run(declared.reference, trial, {"ghost": strategies["ghost"]}, tmp_path, world=1)
    for findings, _ in ranks.run(declared.compare, trial, strategies, tmp_path, world=checked.layout.world_size):
        assert all(finding.fine for finding in findings)
        assert findings[1].untrained == names
        said = _unknown(findings)
        assert len(said) == 2 * len(names)
        assert ["ghost" in line and "says nothing of it" in line for line in said] == [False, True][: len(said)]


LATER = """
class Adds:
    steps = -1

    def forward(self, x):
        self.steps += 1
        return super().forward(x) + FACTOR * self.extra
"""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("factor", ["(self.steps == 1)", "1e-15"])
def test_what_trains_in_one_step_only_is_not_listed(ghost, world, factor):
    """The second of three; what rounding leaves of a gradient is none."""
    before, _, after = CODE.partition("class Adds:")
    ranks = ghost(factor, before + LATER + "\n\n@attrs.define\n" + after.partition("@attrs.define\n")[2])
    strategies = {"ghost": {}, **({"fsdp2": {}} if world > 1 else {})}
    for result in ranks.run(train, Trial("llama3"), strategies, world=world):
        assert untrained(result, result, ["norm.extra", "norm.weight"]) == ["norm.extra"] * (factor == "1e-15")


@pytest.mark.slow
def test_a_model_without_gradients_is_no_comparison(ghost):
    ranks = ghost("1", CODE.replace("super().forward(x) +", "0 * super().forward(x) + 0 *"))
    with pytest.raises(AssertionError, match=r"^all gradients of llama3 are zero in one process, so"):
        Ghostly().test_models_equal_one_process(ranks, "llama3")


def test_the_plugin_carries_the_names_to_the_summary():
    class Item:
        cls, instance, user_properties = Ghostly, Ghostly(), []

    Item.instance.untrained = ("x of llama3",)
    pytest_runtest_makereport(Item, None)
    ((_, told),) = Item.user_properties
    assert (told["name"], told["untrained"]) == ("ghost", ["x of llama3"])
    assert Trial("llama3").last is False
