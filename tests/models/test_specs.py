"""What every model owes to strategies, on the shipped one and on three that strategies are tested with."""

import pytest
import torch
from torch.func import functional_call

from plait.contract.model_spec import matches, named
from plait.models.llama3 import Llama3
from plait.parallel.initialize import initialise, materialise
from plait.testing.models import moe, qk_norm
from plait.testing.models.mla import Mla
from plait.testing.models.odd import Odd

LLAMA = {
    "dim": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 48, "vocab_size": 64, "max_seq_len": 64,
}  # fmt: skip
MODELS = {
    "llama3": lambda: Llama3(**LLAMA),
    "llama3-tied": lambda: Llama3(**LLAMA, tie_embeddings=True),
    "qk_norm": qk_norm,
    "qwen3-tied": lambda: qk_norm(tie_embeddings=True),
    "qwen3-experts": lambda: qk_norm(ffn_dim=16, n_experts=8, top_k=2),
    "mla": Mla,
    "mla-full-rank-queries": lambda: Mla(q_rank=None),
    "odd": Odd,
    "moe": lambda: moe(n_layers=2),
    "moe-v2": lambda: moe(n_layers=2, n_dense_layers=0, score="softmax", group_top=1, norm_weights=False),
    "moe-alone": lambda: moe(n_layers=2, n_dense_layers=0, n_shared_experts=0, n_groups=1, q_lora_rank=None),
    "moe-all-dense": lambda: moe(n_layers=2, n_dense_layers=2),
}
SHARDED = ("heads", "kv_heads", "ffn")


def on_meta(name):
    with torch.device("meta"):
        return MODELS[name]()


def real(name):
    """The model in float64, built as a run builds it."""
    model = on_meta(name).double()
    materialise(model, "cpu")
    initialise(model, model.spec(), seed=0)
    return model


def tokens(batch=2, length=16):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def test_axes_name_every_dim_of_every_parameter(name):
    model = on_meta(name)
    spec = model.spec()
    for fqn, param in model.named_parameters(remove_duplicate=False):
        axes = spec.axes_of(fqn)
        assert len(axes) == param.dim(), fqn
        for axis, rows in zip(axes, param.shape, strict=True):
            assert rows % spec.sizes.get(axis, 1) == 0, fqn


def test_every_pattern_says_something(name):
    """Init for parameters and buffers both, and no pattern that nothing matches first."""
    model = on_meta(name)
    spec = model.spec()
    parameters = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [fqn for fqn, _ in model.named_buffers()]
    for table, fqns in ((spec.axes, parameters), (spec.init, parameters + buffers)):
        used = {next(pattern for pattern in table if matches(pattern, fqn)) for fqn in fqns}
        assert used == set(table)


def test_modules_are_where_the_spec_says(name):
    model = on_meta(name)
    spec = model.spec()
    blocks, branches, attention = spec.blocks_of(model), spec.branches_of(model), named(model, (spec.attention,))
    assert len(blocks) == 2
    assert len(branches) == 4
    assert len(attention) == 2
    assert all(any(fqn.startswith(f"{block}.") for block in blocks) for fqn in [*branches, *attention])
    assert len({type(block) for block in blocks.values()}) == 1


def test_before_and_after_hold_all_outside_blocks(name):
    model = on_meta(name)
    spec = model.spec()
    held = {
        p
        for found in (spec.blocks_of, spec.before_of, spec.after_of)
        for m in found(model).values()
        for p in m.parameters()
    }
    assert held == set(model.parameters())


def test_before_and_after_are_read_in_their_own_forward_alone(name):
    """Elsewhere their parameters are not a number."""
    model = real(name)
    want = model(tokens())
    spec, order = model.spec(), []
    values = {p: p.detach().clone() for p in model.parameters()}

    def fill(module, how):
        for param in module.parameters():
            param.data.copy_(how(param))

    for field, found in (("before", spec.before_of), ("block", spec.blocks_of), ("after", spec.after_of)):
        for fqn, module in found(model).items():
            module.register_forward_pre_hook(lambda module, args, name=(field, fqn): order.append(name))
            if field != "block":
                fill(module, lambda param: torch.full_like(param, torch.nan))
                module.register_forward_pre_hook(lambda module, args: fill(module, values.__getitem__))
                module.register_forward_hook(
                    lambda module, args, out: fill(module, lambda param: torch.full_like(param, torch.nan))
                )
    assert torch.equal(model(tokens()), want)
    assert len(order) == len(set(order))
    assert [field for field, _ in order] == sorted(
        (field for field, _ in order), key=("before", "block", "after").index
    )


def test_logits(name):
    model = real(name)
    logits = model(tokens())
    assert logits.shape == (2, 16, 64)
    assert logits.isfinite().all()
    assert on_meta(name)(tokens().to("meta")).shape == logits.shape
    assert on_meta(name)(tokens().to("meta"), tokens().to("meta")).shape == logits.shape


def test_gradients_reach_every_parameter(name):
    model = real(name)
    torch.nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    for fqn, param in model.named_parameters():
        assert param.grad is not None, fqn
        if not fqn.endswith("key.bias"):  # softmax does not feel it: its true gradient is 0
            assert param.grad.norm() > 0, fqn


def test_no_token_sees_a_later_one(name):
    model = real(name)
    before = tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 64
    one, other = model(before), model(after)
    torch.testing.assert_close(one[:, :9], other[:, :9], rtol=0, atol=1e-13)
    assert (one[:, 9:] - other[:, 9:]).abs().amin(dim=1).max() > 1e-9


def test_packed_documents_are_separate_documents(name):
    model = real(name)
    packed = tokens(1, 16)
    lengths = [5, 1, 10]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    apart = torch.cat([model(document) for document in packed.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(model(packed, positions), apart, rtol=0, atol=1e-13)
    assert (model(packed) - apart)[:, 5:].abs().max() > 1e-6


def test_positions_from_zero_are_the_default(name):
    model = real(name)
    torch.testing.assert_close(model(tokens(), torch.arange(16).expand(2, 16)), model(tokens()), rtol=0, atol=1e-13)


@pytest.mark.parametrize("ranks", [2, 4])
def test_halves_of_a_branch_sum_to_the_whole(name, ranks):
    """What tensor parallelism rests on: a branch with a share of its heads or inner width gives a share of its sum."""
    model = real(name)
    spec = model.spec()
    seen = {}
    for fqn, branch in spec.branches_of(model).items():
        branch.register_forward_hook(lambda _, args, out, fqn=fqn: seen.update({fqn: (args, out)}))
    model(tokens(), torch.arange(8).repeat(2).expand(2, 16))
    assert seen.keys() == spec.branches_of(model).keys() != set()
    for fqn, branch in spec.branches_of(model).items():
        args, want = seen[fqn]
        shares = [functional_call(branch, share_of(branch, fqn, spec, rank, ranks), args) for rank in range(ranks)]
        torch.testing.assert_close(sum(shares), want, rtol=0, atol=1e-13)
        assert not torch.allclose(shares[0], want)


def share_of(branch, prefix, spec, rank, ranks):
    shares = {}
    for fqn, param in branch.named_parameters():
        axes = spec.axes_of(f"{prefix}.{fqn}")
        for dim, axis in enumerate(axes):
            if axis in SHARDED:
                assert spec.sizes.get(axis, param.shape[dim]) % ranks == 0
                param = param.chunk(ranks, dim)[rank]
        if axes == ("embed",) and fqn.endswith("bias") and rank > 0:
            param = torch.zeros_like(param)  # beside a weight whose columns are shared, a bias counts once
        shares[fqn] = param
    return shares


def test_flops_by_hand():
    block = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 2 * 8 + 3 * 32 * 64 + 2 * 32
    assert qk_norm().spec().flops(128) == 6 * (2 * block + 32 + 64 * 32) + 6 * 2 * 8 * (8 + 8) * 128
    queries = 32 * 12 + 12 + 12 * 4 * (8 + 4)
    keys = 32 * (16 + 4) + 16 + 16 * 4 * (8 + 6)
    block = queries + keys + 4 * 6 * 32 + 3 * 32 * 64 + 2 * 32
    flops = Mla().spec().flops
    assert flops is not None
    assert flops(128) == 6 * (2 * block + 32 + 64 * 32) + 6 * 2 * 4 * (8 + 4 + 6) * 128
