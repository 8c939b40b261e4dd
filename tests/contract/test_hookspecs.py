"""The strategy at the top of the contract is complete: it runs as it stands there."""

import re
import textwrap

from plait.contract import hookspecs
from plait_testing.pool import Pool


def first_strategy():
    code = re.search(r"A complete strategy:\n\n(.*?)\n\n(?=\S)", hookspecs.__doc__, re.DOTALL)[1]
    scope = {"__name__": __name__}
    exec(textwrap.dedent(code), scope)
    return scope["Freeze"]


def frozen(names):
    from plait_testing.trial import Trial

    trial = Trial("llama3")
    model = trial.apply({}, [first_strategy()(names)]).parts[0]
    return [name for name, p in model.named_parameters() if not p.requires_grad], len(list(model.parameters()))


def test_the_first_strategy_runs(plait_ranks: Pool):
    ((names, count),) = plait_ranks.run(frozen, first_strategy()().names, world=1)
    assert names
    assert len(names) < count
    assert all(name.endswith("norm.weight") for name in names)
    ((names, _),) = plait_ranks.run(frozen, "tok_embeddings.*", world=1)
    assert names == ["tok_embeddings.weight"]
