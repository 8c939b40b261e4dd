"""One run on two machines that share a folder, whatever they call themselves and each other."""

import pytest

from tests.helpers.commands import numbers
from tests.helpers.together import codes, outputs, train


def trained(machines, tmp_path, on_one_machine, endpoint="alpha:29500"):
    runs = [train(machine, tmp_path, endpoint=endpoint) for machine in machines]
    assert codes(*runs) == [0, 0], outputs(*runs)
    assert numbers(tmp_path / "runs" / "a") == on_one_machine
    assert [machine.run("ls", "-A", "/dev/shm") for machine in machines] == ["", ""]
    return runs


def test_two_machines_train_one_run(machines, on_one_machine, tmp_path):
    on_alpha, on_beta = trained(machines, tmp_path, on_one_machine)
    assert "launch: local, 1 rank(s) here; 2 machines meet at alpha:29500" in on_beta.output
    assert "step 10/10" in on_alpha.output  # rank 0 is on the machine of the endpoint
    assert "step 10/10" not in on_beta.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    ["Debian's", "Debian's, by name", "no names", "own name alone", "another network's"],
)
def test_other_names(names, machines, on_one_machine, tmp_path):
    for machine in machines:
        if names.startswith("Debian"):
            machine.knows({each.name: "127.0.1.1" if each is machine else each.address for each in machines})
        elif names == "no names":
            machine.knows({})
        elif names == "own name alone":
            machine.knows({machine.name: machine.address})
        else:
            machine.ip("link", "add", "manage", "type", "veth", "peer", "name", "nowhere")
            machine.ip("link", "set", "manage", "up")
            machine.ip("address", "add", machine.address.replace("10.77", "10.99") + "/24", "dev", "manage")
            machine.knows({each.name: each.address.replace("10.77", "10.99") for each in machines})
    host = "alpha" if names.endswith("by name") else machines["alpha"].address
    trained(machines, tmp_path, on_one_machine, f"{host}:29500")


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["alpha:29500", "[fd77::10]:29500"])
def test_ipv6_alone(endpoint, machines, on_one_machine, tmp_path):
    for number, machine in enumerate(machines, 10):
        machine.ip("address", "flush", "dev", "eth0", "scope", "global")
        machine.ip("address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
        machine.knows({"alpha": "fd77::10", "beta": "fd77::11"})
    trained(machines, tmp_path, on_one_machine, endpoint)
