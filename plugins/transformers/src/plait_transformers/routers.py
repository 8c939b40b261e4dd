"""Which modules of a family are routers whose experts its loss balances: read from a call of transformers' own model, a
small copy, whose gradients are then compared with those of the loss as it is computed here.
"""

import functools
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plait import PlaitError
from plait_transformers.attention import OWN
from plait_transformers.balance import Balanced, Routers, experts_of, give_balance
from plait_transformers.called import Called
from plait_transformers.facts import in_blocks
from plait_transformers.one_sentence import one_sentence
from plait_transformers.proof import TOKENS, blocks_of, built_small, fill, said_of, small_config
from plait_transformers.shrink import VOCAB

FLOAT32 = 1e-5  # the family sums probabilities in float32


def routers_of(config: Any) -> Routers:
    """The routers of a family. Raises PlaitError if it has no balance loss, or one of another form."""
    family: Any = type(config)
    places, numbers = _places(family, said_of(config)), experts_of(config)
    assert numbers is not None
    return Routers(places, *numbers)


@functools.lru_cache(maxsize=8)
def _places(cls: Any, said: str) -> dict[str, tuple[str, int]]:
    """The `logits` of `Routers`."""
    kind = cls.from_dict(json.loads(said)).model_type
    failed = f"model.balance_loss cannot be had for {kind}: the loss of a small copy fails with"
    with one_sentence(failed), torch.device("cpu"):
        small = small_config(cls, said)
        own: Any = built_small(small, OWN, plain=True)
        tokens = torch.randint(4, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
        fill(own)
        seen: dict[int, tuple[str, int]] = {}  # address of a tensor -> the last module that returned it, and its place
        hooks = [m.register_forward_hook(functools.partial(_note, seen, fqn)) for fqn, m in own.named_modules()]
        result = super(Called, own).forward(input_ids=tokens, output_router_logits=True)
        for hook in hooks:
            hook.remove()
        logits, numbers = getattr(result, "router_logits", None), experts_of(small)
        loss = _loss(own, result, numbers) if logits and numbers else None
        if not logits or numbers is None or not isinstance(loss, Tensor):
            raise _refused(f"transformers has no balance loss of experts for {kind}")
        blocks, places = blocks_of(own), dict[str, tuple[str, int]]()
        for each in logits:
            fqn, place = seen[each.data_ptr()]
            places[in_blocks(blocks, fqn)] = type(own.get_submodule(fqn)).__name__, place
        wanted = _gradients(own, loss)
        give_balance(own, Routers(places, *numbers), 1.0)
        least = 1e-12 * max(float(each.abs().max()) for each in wanted.values())  # below it there is only rounding
        errors = {fqn: (found - wanted[fqn]).abs().max() for fqn, found in _ours(own, tokens)}
        if any(float(each) > FLOAT32 * float(wanted[fqn].abs().max()) + least for fqn, each in errors.items()):
            raise _refused(f"the balance loss of {kind} in transformers is of another form than that which Plait knows")
    return places


def _loss(own: Any, result: Any, numbers: tuple[int, int]) -> Any:
    """The loss that transformers' class returned, or that of its function, if the class is that of the blocks alone."""
    if getattr(result, "aux_loss", None) is not None:
        return result.aux_loss
    function = getattr(sys.modules[type(own.base_model).__module__], "load_balancing_loss_func", None)
    return None if function is None else function(result.router_logits, *numbers)


def _refused(why: str) -> PlaitError:
    return PlaitError(f"{why}; with model.balance_loss=0 it trains without").at("model.balance_loss", fits=(0,))


def _note(seen: dict[int, tuple[str, int]], fqn: str, module: nn.Module, args: Any, result: Any) -> None:
    for place, part in enumerate(result if isinstance(result, tuple) else (result,)):
        if isinstance(part, Tensor):
            seen[part.data_ptr()] = fqn, place


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def _ours(model: Any, tokens: Tensor) -> Iterable[tuple[str, Tensor]]:
    """What `plait.parallel.expert_balance` does in a run, on one rank."""
    routers = [module for module in model.modules() if isinstance(module, Balanced)]
    for router in routers:
        router.training = True
    logits = super(Called, model).forward(input_ids=tokens).logits
    counts = torch.stack([router.now for router in routers]).sum(0).double()
    for router in routers:
        router.loss_scale.data.copy_(counts / counts.sum() ** 2)
    return _gradients(model, logits.sum() * 0.0).items()
