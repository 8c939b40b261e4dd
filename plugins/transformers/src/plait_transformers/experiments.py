"""The experiments on a small copy of a model: each says one thing that a spec may say, or refuses the family."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait import PlaitError
from plait_transformers.attention import Inner
from plait_transformers.called import Called
from plait_transformers.shrink import VOCAB
from plait_transformers.torch_internals import writes_to
from plait_transformers.watch import Watch, first

BOUND = 1e-4  # families compute parts in float32 by hand; what is wrong is off by far more
EXACT = 1e-9  # of one computation that is done again
DRAWS = 20  # enough to see a layer that is left out one time in ten


def mixes(model: nn.Module, fqn: str, watch: Watch) -> bool:
    """Whether the module `fqn` mixes tokens in a way of its own: without inner attention, too, others change with one.

    True also for what cannot be told.
    """
    call = watch.calls.get(fqn)
    if call is None or call.entered is None or call.result is None:
        return True
    at = (0, 3) if call.entered.dim() > 2 else (3,)
    other = call.entered.clone()
    other[at] += 1.0
    changed = [other if each is call.entered else each for each in call.args]
    named = {name: other if each is call.entered else each for name, each in call.kwargs.items()}
    module = model.get_submodule(fqn)
    hooks = [
        m.register_forward_hook(lambda *_: torch.zeros_like(_[2])) for m in module.modules() if isinstance(m, Inner)
    ]
    found: list[Any] = [first(module(*a, **k)) for a, k in ((call.args, call.kwargs), (changed, named))]
    for hook in hooks:
        hook.remove()
    change = (found[0] - found[1]).abs()
    change[at] = 0
    return float(change.max()) > EXACT * float(found[0].abs().max())


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max() / y.abs().max()) if x.shape == y.shape else float("inf")


def check_causal(kind: str, own: nn.Module, tokens: Tensor, causal: bool) -> Tensor:
    """The logits of transformers' own forward. Raises PlaitError if it should be causal, and is not."""
    plain: Any = super(Called, own)
    logits, other = (plain.forward(input_ids=ids, use_cache=False).logits for ids in (tokens, _with_other(tokens, -1)))
    if causal and apart(other[:, :-1], logits[:, :-1]) > BOUND:
        raise PlaitError(
            f"tokens of this {kind} see later ones, so it cannot predict the next one; model=transformers trains it on "
            "data=masked if transformers has it for masked tokens and model.config does not say otherwise"
        )
    return logits


@torch.no_grad()
def writes_in_evaluation(own: nn.Module, tokens: Tensor) -> bool:
    """Whether `own` changes its weights in evaluation, as RWKV scales those of later blocks."""
    plain: Any = super(Called, own)
    before = [writes_to(p) for p in own.parameters()]
    plain.forward(input_ids=tokens, use_cache=False)
    return before != [writes_to(p) for p in own.parameters()]


def check_training(kind: str, model: nn.Module, tokens: Tensor, logits: Tensor) -> None:
    """In training it computes the same logits, whatever is drawn."""
    model.train()
    with torch.random.fork_rng(devices=[]):
        for seed in range(DRAWS):
            torch.manual_seed(seed)
            before, found = torch.get_rng_state(), model(tokens)
            if apart(found, logits) > EXACT:
                raise PlaitError(
                    f"model=transformers cannot train {kind}: its logits in training differ from those in evaluation, "
                    "for example by noise from a generator that Plait does not seed"
                )
            if torch.equal(before, torch.get_rng_state()):
                break
    model.eval()


def _with_other(tokens: Tensor, place: int) -> Tensor:
    """`tokens`, of which the one at `place` in the first row is another one; the first 4 are left alone."""
    other = tokens.clone()
    other[0, place] = (other[0, place] - 3) % (VOCAB - 4) + 4
    return other


def are_summands(kind: str, model: nn.Module, tokens: Tensor, branches: list[nn.Module]) -> bool:
    """Whether what the branches return takes part in the stream alone.

    With branches that return what they get, a token's logits depend on that token alone; PlaitError if on others too.
    False for a branch that gets the stream twice, such as once to add it to its result.
    """
    streams = list[int]()  # that a branch gets

    def itself(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        computed: Any = first(result)
        got = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.shape == computed.shape]
        streams.append(len(got))
        same = got[0] if got else torch.zeros_like(computed)
        return (same, *result[1:]) if isinstance(result, tuple) else same

    hooks = [branch.register_forward_hook(itself, with_kwargs=True) for branch in branches]
    change = (model(tokens) - model(_with_other(tokens, 3))).abs().amax(-1)
    for hook in hooks:
        hook.remove()
    if max(streams, default=0) > 1 or float(change[0, 3]) == 0:
        return False
    change[0, 3] = 0
    if float(change.max()) > 0:
        raise PlaitError(f"model=transformers cannot train {kind}: it mixes tokens outside attention and feed-forward")
    return True


def needs_whole_rows(model: nn.Module, watch: Watch, blocks: str) -> bool:
    """Whether the family makes what it gives to blocks, such as positions, of the tokens of the stream that it sees:
    with half of each looked-up row, as a rank of sequence parallelism has it, a block gets less."""
    layers: Any = model.get_submodule(blocks)
    usual, (tokens, *_), seen = watch.calls[f"{blocks}.0"], watch.tokens, list[Any]()
    outside = [m for fqn, m in model.named_modules() if isinstance(m, nn.Embedding) and not fqn.startswith(blocks)]

    def half(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return result.narrow(-2, 0, result.shape[-2] // 2)

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.extend(_tensors((args, kwargs)))
        raise InterruptedError

    hooks = [table.register_forward_hook(half) for table in outside]
    hooks.append(layers[0].register_forward_pre_hook(stop, with_kwargs=True))
    with contextlib.suppress(Exception):  # without `seen`, the first forward says what is wrong
        model(tokens)
    for hook in hooks:
        hook.remove()
    before = [tuple(x.shape) for x in _tensors((usual.args, usual.kwargs))]
    after = [tuple(x.shape) for x in seen]
    return len(after) == len(before) and after[1:] != before[1:]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    for each in values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ():
        yield from _tensors(each)


def can_be_cut(model: nn.Module, watch: Watch, blocks: str, logits: Tensor) -> bool:
    """Whether blocks pass on nothing but the stream, so that a stage of a pipeline may begin with the second."""
    layers: Any = model.get_submodule(blocks)
    stream, (tokens, *_) = watch.calls[f"{blocks}.0"].result, watch.tokens
    layers[0].forward = lambda *args, **kwargs: stream
    try:
        return apart(model(tokens), logits) <= EXACT
    except Exception:  # whatever the family raises: its blocks need more than the stream
        return False
    finally:
        del layers[0].forward
