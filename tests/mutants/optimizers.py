"""Bugs of optimizers that need whole matrices."""

from tests.mutants.planted import Mutant

MUTANTS = [
    Mutant(
        "a rank orthogonalises its own shard for the whole matrix",
        "plait_muon/deal.py",
        "tuple([owner] if whole else senders)",
        "(owner,)",
        "test_steps_equal_one_process",
        "Muon makes a different step on a shard than on the whole",
        strategy="muon",
        on={"layout": "tensor ranks"},
    ),
    Mutant(
        "the size of an update is that of a rank's shard",
        "plait_muon/muon.py",
        "shape = stack.whole_NRC.shape[-2:]",
        "shape = local(params[route.own[0].param]).shape[-2:]",
        "test_steps_equal_one_process",
        "Muon makes a different step on a shard than on the whole",
        strategy="muon",
        on={"layout": "tensor ranks"},
    ),
    Mutant(
        "second moments of rows stay with the rank that computes them",
        "plait_muon/rows.py",
        "            dist.all_reduce(every, group=holders.get_group())",
        "            pass",
        "test_steps_equal_one_process",
        "as a plain tensor that differs between ranks",
        strategy="muon",
        on={"layout": "tensor ranks"},
    ),
    Mutant(
        "the matrices of experts are scaled by the norm of those on a rank",
        "plait_muon/newton_schulz.py",
        "x_NRC.norm(dim=(-2, -1), keepdim=True)",
        "x_NRC.norm()",
        "test_steps_equal_one_process",
        "Muon makes a different step on a shard than on the whole",
        strategy="muon",
        on={"layout": "experts and shards of tensor ranks"},
    ),
    Mutant(
        "momenta of matrices stand outside of the optimizer's state",
        "plait_muon/muon.py",
        "        state = self.state[param]\n",
        '        state = self.__dict__.setdefault("momenta", {}).setdefault(param, {})\n',
        "test_one_process_takes_it",
        "Muon cannot be saved: Muon keeps 'momenta' of its parameters elsewhere than in `state`",
        strategy="muon",
    ),
]
