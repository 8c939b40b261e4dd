"""What docs/compatibility.md promises of API 1 stays true as long as the core says that it runs API 1."""

import inspect
import re
from pathlib import Path

import pluggy

from plait.contract import hookspecs

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
PROMISED = {
    hook: re.findall(r"`(\w+)`", arguments)
    for hook, arguments in re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", PAGE, re.MULTILINE)
}


def test_every_hook_and_argument_of_api_1_is_there():
    assert 1 in hookspecs.APIS
    assert len(PROMISED) == 15
    for hook, arguments in PROMISED.items():
        assert set(arguments) <= set(inspect.signature(getattr(hookspecs, hook)).parameters), hook


def test_the_page_knows_every_hook_and_version():
    hooks = {name for name, value in vars(hookspecs).items() if hasattr(value, "plait_spec")}
    assert hooks == set(PROMISED)
    assert f"one integer version, now **{hookspecs.API}**" in PAGE


def test_a_method_takes_the_arguments_that_it_wants():
    class Wants:
        @hookspecs.hookimpl
        def after_step(self, step):
            seen.append(step)

    seen = []
    manager = pluggy.PluginManager("plait")
    manager.add_hookspecs(hookspecs)
    manager.register(Wants())
    manager.hook.after_step(model=None, optimizer=None, mesh=None, step=3, argument_of_a_later_core=None)
    assert seen == [3]
