"""messages.txt holds the sentence of every error, so that wording is reviewed in one place and tested in none."""

import ast

from tests.docs import messages


def test_the_snapshot_is_up_to_date() -> None:
    written = messages.FILE.read_text()
    assert written == messages.text(), "it is stale: run `python -m tests.docs.messages`"
    lines = written.removeprefix(messages.HEAD).splitlines()
    assert len([line for line in lines if line.startswith("  ")]) > 300
    assert {"core/plait/contract/config.py", "plugins/simplefsdp/src/plait_simplefsdp/plan.py"} <= set(lines)


def test_what_a_source_says() -> None:
    source = """
def f(x, key):
    if x:
        raise PlaitError(f"{key}={x!r} is odd; " + "take another").at(key, x)
    if not key:
        raise misfit("a.b", x, f"at most {x + 1}") from None
    problem = KeyError("not raised, so nobody reads it")
    said = f"no {x}"
    if key:
        return PlaitError(said)
    if x > 2:
        said = f"{x} is more than 2"
    else:
        said = f"{x} is less than 2"
    return PlaitError(said)

def g(said):
    raise PlaitError(said)
"""
    assert list(messages.sentences(ast.parse(source))) == [
        "{key}={x} is odd; take another",
        "a.b is {x}; it must be at most {x + 1}",
        "no {x}",
        "{x} is more than 2",
        "{x} is less than 2",
        "{said}",
    ]
