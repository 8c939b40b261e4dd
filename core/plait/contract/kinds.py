"""The kinds of plugins: the entry points that each has, where a run's config names it, and what it must be."""

from typing import Any

import attrs

from plait.contract.observer import MOMENTS

CLASS, OBJECT = "MODULE:CLASS", "MODULE or MODULE:NAME"  # what an entry point may point to


@attrs.frozen
class PluginKind:
    """A kind of plugin.

    name:    in messages: "strategy". plural: of its entry points, "strategies" for `plait.strategies`.
    node:    the node of the config that maps names to options; then it must be an attrs class, whose fields are these.
             "": the config does not choose it by its name.
    choice:  the group of options from which it is chosen on the command line, "" if it is not.
    key:     the option that has its name as a value, "" if none has. words: further values of that option, which are
             no plugin's name.
    target:  what an entry point must point to.
    methods: what it must have. some: of what it must have one at least.
    """

    name: str
    plural: str
    node: str = ""
    choice: str = ""
    key: str = ""
    words: tuple[str, ...] = ()
    target: str = CLASS
    methods: tuple[str, ...] = ()
    some: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return f"plait.{self.plural}"

    @property
    def several(self) -> bool:
        """Whether a run takes several of them: then group and node of its config have one name."""
        return bool(self.node) and self.node == self.choice

    @property
    def where(self) -> str:
        """What errors about one of them are about."""
        return self.choice or self.key or self.name

    def key_of(self, name: str) -> str:
        """The key of the options of the plugin `name`."""
        return f"{self.node}.{name}"

    @property
    def must(self) -> str:
        """What it must be, in words."""
        what = "an attrs class, whose fields are its options" if self.node else self.target
        needs = [", ".join(self.methods)] if self.methods else []
        needs += [f"one of {', '.join(self.some)}"] if self.some else []
        return f"{what}, with {' and '.join(needs)}" if needs else what

    def lacks(self, made: Any) -> str:
        """What `made` lacks to be a plugin of this kind, as "has no 'log'"; "" if nothing."""
        if self.node and not (isinstance(made, type) and attrs.has(made)):
            return f"is {made!r}, not an attrs class"
        if self.target == CLASS and not callable(made):
            return f"is {made!r}, not a class"
        missing = [name for name in self.methods if not hasattr(made, name)]
        if missing or (self.some and not any(hasattr(made, name) for name in self.some)):
            return f"has no {missing[0]!r}" if missing else f"has none of {', '.join(self.some)}"
        return ""


KINDS = {
    kind.name: kind
    for kind in (
        PluginKind("strategy", "strategies", "strategy", "strategy"),
        PluginKind("model", "models", choice="model", target=OBJECT),
        PluginKind("source", "sources", choice="data", methods=("open", "check", "prepare")),
        PluginKind("optimizer", "optimizers", choice="optimizer"),
        PluginKind("schedule", "schedules", "schedule.shape", "schedule", methods=("factor",)),
        PluginKind("loss", "losses", "loss.function", "loss", some=("summed", "of_sequences")),
        PluginKind("observer", "observers", "observer", "observer", some=MOMENTS),
        PluginKind("sink", "sinks", "sink", "sink", methods=("open", "log", "close")),
        PluginKind("command", "commands", target=OBJECT, methods=("help", "arguments", "run")),
        PluginKind("hookspecs", "hookspecs", target=OBJECT),
        PluginKind("pruner", "pruners", target=OBJECT, methods=("cannot_work",)),
        PluginKind(
            *("launcher", "launchers", "", "", "launch.mode"),
            words=("auto", "local", "external"),
            target=OBJECT,
            methods=("detect",),
            some=("variables", "machines"),
        ),
    )
}
