"""The installed plugins of every kind, for programs: which there are, what each is, and instances of them. Imports no
torch."""

from typing import Any

from plait.contract.hookspecs import API
from plait.contract.kinds import KINDS
from plait.strategies.blame import blamed
from plait.strategies.hooks import HOOKS, Hooks
from plait.strategies.order import claimed, order
from plait.strategies.probe import probe
from plait.strategies.registry import Plugin, create, create_all, described, installed, load

__all__ = [
    "API",
    "KINDS",
    "Plugin",
    "blamed",
    "claimed",
    "create",
    "create_all",
    "described",
    "hooks",
    "installed",
    "load",
    "order",
    "probe",
]


def hooks(name: str, strategy: Any) -> list[str]:
    """The hooks that an instance of the strategy `name` has, in the order of the contract. Raises PlaitError if one of
    them does not fit the contract."""
    made = Hooks({name: strategy})
    return [hook for hook in HOOKS if made.implemented(hook)]
