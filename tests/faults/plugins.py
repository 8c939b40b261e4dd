"""Plugins that misbehave: each is named in one sentence, and what the run had is as it was."""

import shutil
import textwrap

from tests.faults.place import SHORT
from tests.faults.scenario import Scenario
from tests.faults.verdict import refused
from tests.helpers.fakes import distribution

HEAD = """
import os, sys, time, signal
import attrs
from plait import MeshAxis, hookimpl
"""
HOOK = "@hookimpl\ndef "
ONE_MORE = "splits the batch and sums nothing"
# name -> (code before the class, the hook that the class has)
MISBEHAVIOUR = {
    "exits when it is imported": ("sys.exit(3)", ""),
    "raises when it is imported": ("raise RuntimeError('no luck')", ""),
    "lacks a module": ("import surely_not_installed", ""),
    "has a syntax error": ("def broken(:", ""),
    "raises in configure": ("", "configure(self, run): raise ValueError('no luck')"),
    "exits in configure": ("", "configure(self, run): sys.exit(0)"),
    "answers build_mesh with a number": ("", "build_mesh(self): return 3"),
    "answers build_mesh with names": ("", "build_mesh(self): return ['a', 'b']"),
    ONE_MORE: ("", "build_mesh(self): return [MeshAxis('x', 2, splits='batch')]"),
    "has an unknown hook": ("", "paralellize(self, model): return model"),
    "asks a hook for an unknown argument": ("", "parallelize(self, model, modell): return model"),
    "answers parallelize with a string": ("", "parallelize(self, model): return 'a model'"),
    "raises in parallelize": ("", "parallelize(self, model): raise RuntimeError('no luck')"),
    "exits in parallelize": ("", "parallelize(self, model): sys.exit(0)"),
    "ends the process in parallelize": ("", "parallelize(self, model): os._exit(0)"),
    "crashes in parallelize": ("", "parallelize(self, model): os.kill(os.getpid(), signal.SIGSEGV)"),
    "answers compile with a number": ("", "compile(self, model): return 5"),
    "answers clip_grads with a string": ("", "clip_grads(self, parameters): return 'small'"),
    "answers clip_grads with NaN": ("", "clip_grads(self, parameters): return float('nan')"),
    "raises in clip_grads": ("", "clip_grads(self, parameters): raise RuntimeError('no luck')"),
    "answers checkpoint with a list": ("", "checkpoint(self, model): return [1, 2]"),
    "raises in checkpoint": ("", "checkpoint(self, model): raise RuntimeError('no luck')"),
    "raises in after_step": ("", "after_step(self, step):\n    if step == 23: raise RuntimeError('no luck')"),
    "exits in after_step": ("", "after_step(self, step):\n    if step == 23: sys.exit(0)"),
    "writes infinity in after_step": (
        "",
        "after_step(self, model, step):\n"
        "    if step == 23: next(iter(model.parameters())).data.fill_(float('inf'))",
    ),
}  # fmt: skip
NAMED = (r"strategy 'odd'|plait-odd|odd\b",)
NUMBERS = (*NAMED, "not finite|nan|inf|infinite")  # a plugin that spoils numbers is not seen to have done it


def misbehaving(scenario: Scenario) -> None:
    """A plugin that misbehaves is selected for a run that was stopped; without it the run goes on."""
    rng, place = scenario.rng, scenario.place
    place.work.rmdir()
    shutil.copytree(scenario.base(place.layout, False), place.work)
    name = rng.choice(list(MISBEHAVIOUR))
    site = place.root / "site"
    before, body = MISBEHAVIOUR[name]
    cls = "@attrs.define\nclass Odd:\n" + textwrap.indent(HOOK + body if body else "pass", "    ") + "\n"
    distribution(site, "plait-odd", {"odd": "Odd"}, code=f"{HEAD}\n{before}\n\n{cls}")
    place.env["PYTHONPATH"] = str(site)
    scenario.plant(f"a plugin {name}")
    strategy = next(a for a in place.arguments() if a.startswith("strategy="))
    ended = place.run(*SHORT, strategy.replace("[", "[odd,").replace(",]", "]"))
    if ended.code == 0 and name == ONE_MORE and place.layout == "fsdp2":  # it sums over all axes that split the batch
        scenario.finishes(steps=SHORT, ended=ended)
        return
    verdict = refused(place, ended, *(NUMBERS if "NaN" in name or "infinity" in name else NAMED))
    scenario.came_to(verdict)
    del place.env["PYTHONPATH"]
    scenario.finishes(steps=SHORT)
