"""Bugs of optimizers that need whole matrices."""

from tests.mutants.planted import Mutant

MUTANTS = [
    Mutant(
        "Newton-Schulz takes a rank's shard for the whole matrix",
        "plait_muon/newton_schulz.py",
        "each_whole = [Shard(0)] * like.device_mesh.ndim",
        "each_whole = placements",
        "test_steps_equal_one_process",
        "Muon makes a different step on a shard than on the whole",
        strategy="muon",
        on={"layout": "shards"},
    ),
    Mutant(
        "the matrices of experts are scaled by the norm of those on a rank",
        "plait_muon/newton_schulz.py",
        "x_NRC.norm(dim=(-2, -1), keepdim=True)",
        "x_NRC.norm()",
        "test_steps_equal_one_process",
        "Muon makes a different step on a shard than on the whole",
        strategy="muon",
        on={"layout": "experts"},
    ),
    Mutant(
        "momenta of matrices stand outside of the optimizer's state",
        "plait_muon/muon.py",
        '        state = self.state[param]\n        if not state:\n            state["momentum_buffer"]',
        '        state = self.__dict__.setdefault("momenta", {}).setdefault(param, {})\n'
        '        if not state:\n            state["momentum_buffer"]',
        "test_one_process_takes_it",
        "Muon cannot be saved: Muon keeps 'momenta' of its parameters elsewhere than in `state`",
        strategy="muon",
    ),
]
