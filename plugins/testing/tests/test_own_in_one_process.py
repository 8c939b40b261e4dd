"""A strategy with its own numerics and no axes is compared with itself in one process, and with exact training."""

import pytest

from plait.contract.errors import PlaitError
from plait.host import compose
from plait.testing import Layout, StrategySuite
from plait_testing import declared
from plait_testing.verify import in_one_process, plan

CODE = """
import attrs
from plait import hookimpl


@attrs.define
class Ghost:
    '''Rounds the rows of matrices to 8 bits.'''

    phase, numerics = "graph", "own"
    DISTANCE

    @hookimpl
    def parallelize(self, model):
        import torch
        from plait import transform_param, whole_tensor

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, param):
                return param.view_as(param)

            @staticmethod
            def backward(ctx, grad):
                return FACTOR * grad

        def rounded(param):
            with torch.no_grad():
                local, whole = (param.to_local() if hasattr(param, "to_local") else param), whole_tensor(param)
                scale = SEEN.abs().amax(1, keepdim=True) / 127
                if len(local) < len(scale):
                    scale = scale.chunk(2)[torch.distributed.get_rank()]
                off = (local / scale).round() * scale - local
                if hasattr(param, "to_local"):
                    off = type(param).from_local(off, param.device_mesh, param.placements)
            return param + off

        for fqn, module in model.named_modules():
            if fqn.startswith("layers.") and getattr(module, "weight", None) is not None and module.weight.dim() == 2:
                transform_param(module, "weight", rounded)
                if fqn == "layers.1.attention.wq":
                    transform_param(module, "weight", Scaled.apply)
"""
PLANTED = {"right": ("1", "whole"), "a doubled gradient": ("2", "whole"), "a part of a row": ("1", "local")}
SMALL = (
    "model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48",
    "model.vocab_size=258", "train.seq_len=16", "strategy=[ghost,tensor_parallel]",
)  # fmt: skip


class Ghostly(StrategySuite):
    strategy = "ghost"
    layouts = {"two": Layout(2, {}, {"tensor_parallel": {}})}  # noqa: RUF012


@pytest.fixture
def ghost(install_ghost):
    """(bug, distance) -> ranks under that strategy."""

    def install(bug="right", distance="distance = 0.05"):
        factor, seen = PLANTED[bug]
        return install_ghost(CODE.replace("FACTOR", factor).replace("SEEN", seen).replace("DISTANCE", distance))

    return install


def test_right(ghost):
    Ghostly().test_gradients_equal_one_process(ghost(), "two")


@pytest.mark.slow
def test_the_suite_asks_for_the_distance_from_exact_training(ghost):
    with pytest.warns(UserWarning, match=r"the reference of ghost is the strategy itself.* declare `distance`"):
        Ghostly().test_gradients_equal_one_process(ghost(distance="pass"), "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("a doubled gradient", r"its numerics are its own, but .* the first is 'layers\.1\.attention\.wq\.weight'"),
        ("a part of a row", r"gradients are wrong; the first is .*\(bound 1e-10\)"),
    ],
)
def test_the_suite_names_it(ghost, bug, says):
    with pytest.raises(AssertionError, match=says):
        Ghostly().test_gradients_equal_one_process(ghost(bug), "two")


@pytest.mark.parametrize(
    ("bug", "wrong", "name"),
    [
        ("right", set(), None),
        pytest.param("a doubled gradient", {declared.EXACT}, "layers.1.attention.wq.weight", marks=pytest.mark.slow),
        ("a part of a row", {declared.FIRST, declared.LOSSES, declared.NORMS}, "layers.0.attention.wo.weight"),
    ],
)
def test_verify_names_it(ghost, tmp_path, bug, wrong, name):
    ranks, checked = ghost(bug), plan(compose(list(SMALL)))
    sizes = {"vocab": 258, "data_ranks": checked.layout.count("batch")}
    trial = declared.OfRun(config=checked.config, **sizes, last=True, documents=True)
    one, exact, distance = in_one_process(checked.config.strategy)
    assert (list(one), exact, distance) == (["ghost"], {}, 0.05)
    ranks.run(declared.reference, trial, one, tmp_path, exact, world=1)
    strategies = dict(checked.config.strategy)
    for findings, _ in ranks.run(declared.compare, trial, strategies, tmp_path, distance, world=2):
        off = {finding.what: finding for finding in findings if not finding.fine}
        assert off.keys() == wrong
        assert not name or name in next(iter(off.values())).wrong
    said = " ".join(declared.meaning(findings, documents=False))
    assert ("further from exact training than its `distance`" in said) == (bug == "a doubled gradient")


@pytest.mark.parametrize("distance", ["0.0", "0.5", "True", "'small'"])
def test_a_distance_that_would_hide_a_factor_is_refused(ghost, distance):
    ghost(distance=f"distance = {distance}")
    with pytest.raises(PlaitError, match=r"has distance = .*, which must be above 0 and at most 0\.4"):
        Ghostly().test_declarations_name_things_that_exist()
