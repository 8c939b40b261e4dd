"""What befalls a run on several machines. Each run ends bitwise as the undisturbed one on one machine with as many
ranks, or is refused in one sentence on every machine and then, without the fault, ends bitwise equal."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tests.faults.place import SEVERAL, SHORT
from tests.faults.scenario import Scenario
from tests.faults.several.cluster import Cluster, Launcher
from tests.faults.verdict import Defect, clean, equal

OTHER_CLOCK = str(Path(__file__).parents[2] / "helpers" / "other_clock.c")
TRIES = 8  # starts of a machine's command until the run must be done
TOGETHER = ("launch.max_restarts=1000", "launch.rendezvous_seconds=60")
DRAIN = 10.0  # seconds of the run within which all machines end after one was told to
APART = (0, 1, 143)  # of a machine whose others crash: it may also end, and say that the endpoint's machine is gone


def cluster_of(scenario: Scenario) -> Cluster:
    _, count, ranks, _ = SEVERAL[scenario.place.layout]
    return Cluster(scenario.place, count, ranks, TOGETHER, str(count))


def finishes(scenario: Scenario, cluster: Cluster, steps: tuple[str, ...], codes: tuple[int, ...] = APART) -> None:
    """The commands, given again where they ended early, end bitwise as the undisturbed run."""
    tries = dict.fromkeys(cluster.names, 0)
    while True:
        for each in cluster.launchers:
            if not each.judged and each.ended():
                cluster.judge(each, *codes)
        if _is_done(cluster):
            break
        for name in cluster.names:
            if not cluster.live(name):
                tries[name] += 1
                if tries[name] > TRIES:
                    raise Defect(f"not done after {TRIES} starts on {name}:\n{cluster.text()}")
                cluster.start(name, *steps)
        cluster.until(lambda: len(cluster.live()) < len(cluster.names))
    ends(scenario, cluster)
    done = next(each for each in cluster.launchers if each.wait().code == 0)
    scenario.came_to(equal(scenario.place, done.wait(), scenario.reference(scenario.place.layout, steps)))


def names_the_killed(cluster: Cluster) -> None:
    """The first cause is reported: a machine whose ranks only lost another is not all that one hears of."""
    said = "".join(each.text() for each in cluster.launchers)
    if re.search(r"rank \d+ lost another", said) and "was killed by SIGKILL" not in said:
        raise Defect(f"no console names the rank that was killed:\n{cluster.text()}")


def ends(scenario: Scenario, cluster: Cluster) -> None:
    """The run is done: whoever still takes part ends too. A command that was given again just now waits in vain."""
    with contextlib.suppress(Defect):
        cluster.until(lambda: not cluster.live(), 12)
    for late in cluster.live():
        if cluster.seconds > late.began + 30:
            raise Defect(f"the run is done, but {late.machine and late.machine.name} goes on:\n{cluster.text()}")
        late.signal(signal.SIGTERM)
    cluster.until(lambda: not cluster.live())
    for each in cluster.launchers:
        if not each.judged:
            cluster.judge(each, *APART)
    cluster.clean()


def _is_done(cluster: Cluster) -> bool:
    return any(each.ended() and each.wait().code == 0 for each in cluster.launchers)


def refused_on_all(scenario: Scenario, cluster: Cluster, launchers: list[Launcher], *named: str) -> None:
    """Each said why in one sentence, of which one names the cause; nobody trained."""
    cluster.until(lambda: not cluster.live())
    for each in launchers:
        cluster.judge(each, 1)
    sentences = [each.wait().sentence for each in launchers]
    if not any(re.search(pattern, each) for pattern in named for each in sentences):
        raise Defect(f"no sentence names the cause ({' | '.join(named)}):\n{cluster.text()}")
    clean(scenario.place)
    cluster.clean()
    scenario.came_to("refused")


def somewhere(scenario: Scenario, cluster: Cluster, share: float = 1.0) -> bool:
    """Wait until the run starts, or until it trains. Whether it still goes on."""
    rng = scenario.rng
    if rng.random() < 0.3:
        cluster.sleep(rng.uniform(0.5, 6))
    elif cluster.row(rng.randint(1, int(scenario.last * share))):
        cluster.sleep(rng.uniform(0, 0.05))
    return len(cluster.live()) == len(cluster.names)


# --- processes and machines that end


def rank_killed(scenario: Scenario, cluster: Cluster) -> None:
    rng = scenario.rng
    cluster.start_all(*scenario.steps)
    for _ in range(rng.randint(1, 3)):
        if cluster.last_row() > scenario.last or not somewhere(scenario, cluster):
            break
        name = rng.choice(cluster.names)
        if ranks := cluster.ranks_of(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(ranks), signal.SIGKILL)
            scenario.plant(f"a rank of {name}: SIGKILL")
    finishes(scenario, cluster, scenario.steps)
    names_the_killed(cluster)


def launcher_killed(scenario: Scenario, cluster: Cluster) -> None:
    cluster.start_all(*scenario.steps)
    if somewhere(scenario, cluster):
        name = scenario.rng.choice(cluster.names)
        for each in cluster.live(name):
            each.signal(signal.SIGKILL)
            each.judged = True
            scenario.plant(f"the launcher of {name}: SIGKILL")
        cluster.until(lambda: not cluster.live(name))
    finishes(scenario, cluster, scenario.steps)


def lost(how: str) -> Callable[[Scenario, Cluster], None]:
    def befall(scenario: Scenario, cluster: Cluster) -> None:
        rng = scenario.rng
        cluster.start_all(*scenario.steps)
        for _ in range(rng.choice([1, 1, 2])):
            if cluster.last_row() > scenario.last or not somewhere(scenario, cluster):
                break
            name = rng.choice(cluster.names)
            cluster.lose(name, how)
            scenario.plant(f"{name}: {how.replace('_', ' ')}")
            cluster.sleep(rng.choice([0, rng.uniform(0, 20)]))
            cluster[name].boot()
            cluster.start(name, *scenario.steps)
        finishes(scenario, cluster, scenario.steps)

    return befall


def drained(scenario: Scenario, cluster: Cluster) -> None:
    """SIGTERM to one machine's launcher: all save, and end within ten seconds of the run."""
    rng = scenario.rng
    launchers = cluster.start_all(*scenario.steps)
    if somewhere(scenario, cluster):
        told = rng.choice(launchers)
        told.signal(rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT]))
        scenario.plant(f"{told.machine and told.machine.name}: told to stop")
        began, training = cluster.seconds, cluster.last_row() > 0
        cluster.until(told.ended)
        if training:
            cluster.until(lambda: not cluster.live())
            took = cluster.seconds - began
            scenario.notes.append(f"all ended within {took:.1f} s")
            if took > DRAIN:
                raise Defect(f"{took:.1f} s until all machines ended:\n{cluster.text()}")
    finishes(scenario, cluster, scenario.steps, (0, 1, 130, 143))


# --- the network


def link_cut(scenario: Scenario, cluster: Cluster) -> None:
    rng = scenario.rng
    cluster.start_all(*scenario.steps)
    if somewhere(scenario, cluster):
        name, seconds = rng.choice(cluster.names), rng.choice([1, 3, rng.uniform(1, 30)])
        cluster[name].cut()
        scenario.plant(f"{name}: link cut for {seconds:.0f} s")
        try:
            cluster.sleep(seconds)
        finally:
            cluster[name].mend()
    finishes(scenario, cluster, scenario.steps)


def slow_link(scenario: Scenario, cluster: Cluster) -> None:
    """Delay and loss of packets between all machines, from the start."""
    rng = scenario.rng
    delay, loss = rng.choice([(0.002, 0.0), (0.005, 0.0), (0.001, 0.01), (0.0, 0.03)])
    pids = [f"{cluster[name].pid},{cluster[name].address}/24" for name in cluster.names]
    switch = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("slow_switch.py")), str(delay), str(loss), *pids],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert switch.stdout is not None
    try:
        if switch.stdout.readline() != "ready\n":
            scenario.notes.append("no slow link here: it needs root and /dev/net/tun")
        else:
            scenario.plant(f"all links: {delay * 1000:g} ms, {loss:.0%} lost")
        cluster.start_all(*SHORT)
        finishes(scenario, cluster, SHORT)
    finally:
        switch.communicate()


# --- machines that differ


def other_clock(scenario: Scenario, cluster: Cluster) -> None:
    """The time of day of one machine is not that of the others."""
    rng = scenario.rng
    name, seconds = rng.choice(cluster.names), rng.choice([-3, 2, 60, -3600, 86400 * 400, -86400 * 400])
    if not (compiler := shutil.which("cc")):
        scenario.notes.append("no other clock here: it needs a C compiler")
        return
    library = str(scenario.place.root / "other_clock.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, OTHER_CLOCK, "-ldl"], check=True)
    env = {"LD_PRELOAD": library, "OTHER_CLOCK": str(seconds)}
    for each in cluster.names:
        here = env if each == name else {}
        cluster.start(each, *scenario.steps, cold=bool(here), **here)
    if cluster.row(1):
        scenario.plant(f"{name}: clock {seconds:+d} s")
        if any(library not in Path(f"/proc/{rank}/maps").read_text() for rank in cluster.ranks_of(name)):
            raise RuntimeError("there are ranks with the right clock")
    if rng.random() < 0.6 and somewhere(scenario, cluster) and (ranks := cluster.ranks_of(rng.choice(cluster.names))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[0], signal.SIGKILL)
        scenario.plant("a rank: SIGKILL beside another clock")
    finishes(scenario, cluster, scenario.steps)
    names_the_killed(cluster)


def wrong_version(scenario: Scenario, cluster: Cluster) -> None:
    from plait.check import facts

    name, package = scenario.rng.choice(cluster.names), scenario.rng.choice(["torch", "plait-fsdp2"])
    own, module = facts.version, cast(Any, facts)

    def prepare() -> None:
        module.version = lambda each: "0.0.7" if each == package else own(each)

    scenario.plant(f"{name}: another {package}")
    launchers = [
        cluster.start(each, *SHORT, prepare=prepare if each == name else lambda: None) for each in cluster.names
    ]
    refused_on_all(scenario, cluster, launchers, rf"{package} .*0\.0\.7")
    finishes(scenario, cluster, SHORT)


def wrong_code(scenario: Scenario, cluster: Cluster) -> None:
    import plait_models.llama3

    name, source = scenario.rng.choice(cluster.names), Path(plait_models.llama3.__file__)
    other = scenario.place.root / "llama3.py"
    other.write_text(source.read_text() + "\n# patched on one machine\n")
    cluster[name].run("mount", "--bind", str(other), str(source))
    scenario.plant(f"{name}: another plait_models/llama3.py")
    refused_on_all(scenario, cluster, cluster.start_all(*SHORT), r"llama3\.py on \w+ is not that on \w+")
    cluster[name].run("umount", str(source))
    finishes(scenario, cluster, SHORT)


def wrong_data(scenario: Scenario, cluster: Cluster) -> None:
    rng, place = scenario.rng, scenario.place
    name, other = rng.choice(cluster.names), place.root / "other-text"
    other.mkdir()
    missing = rng.random() < 0.3
    for path in [] if missing else sorted(place.text.iterdir()):
        (other / path.name).write_bytes(path.read_bytes().replace(b"a", b"e"))
    cluster[name].run("mount", "--bind", str(other), str(place.text))
    scenario.plant(f"{name}: {'no' if missing else 'other'} data")
    named = "no files|is empty|holds no|data" if missing else "the data or its tokenizer"
    refused_on_all(scenario, cluster, cluster.start_all(*SHORT), named)
    cluster[name].run("umount", str(place.text))
    finishes(scenario, cluster, SHORT)


def wrong_command(scenario: Scenario, cluster: Cluster) -> None:
    rng = scenario.rng
    name = rng.choice(cluster.names)
    key, value = rng.choice([("optimizer.lr", "3e-2"), ("model.n_layers", "3"), ("train.steps", "60")])
    scenario.plant(f"{name}: {key}={value}")
    launchers = [cluster.start(each, *SHORT, *([f"{key}={value}"] if each == name else [])) for each in cluster.names]
    refused_on_all(scenario, cluster, launchers, rf"must be alike: {re.escape(key)}=")
    finishes(scenario, cluster, SHORT)


# --- machines that come late, or twice


def late(scenario: Scenario, cluster: Cluster) -> None:
    rng = scenario.rng
    names = rng.sample(cluster.names, len(cluster.names))
    for name in names:
        cluster.start(name, *SHORT)
        seconds = 0 if name == names[-1] else rng.choice([0, rng.uniform(0, 20)])
        if seconds > 1:
            scenario.plant(f"the machine after {name} comes {seconds:.0f} s later")
        cluster.sleep(seconds)
    finishes(scenario, cluster, SHORT)


def twice(scenario: Scenario, cluster: Cluster) -> None:
    """The command is given twice on one machine: it is a spare, or is refused; the run is undisturbed."""
    rng = scenario.rng
    launchers = cluster.start_all(*scenario.steps)
    cluster.sleep(rng.uniform(0, 1)) if rng.random() < 0.3 else somewhere(scenario, cluster, 0.5)
    name = rng.choice(cluster.names)
    cluster.start(name, *scenario.steps)
    scenario.plant(f"{name}: started twice")
    cluster.until(lambda: sum(each.ended() for each in launchers) >= len(launchers) - 1)
    ends(scenario, cluster)
    done = next((each for each in cluster.launchers if each.wait().code == 0), None)
    if done is None:
        raise Defect(f"nobody trained:\n{cluster.text()}")
    scenario.came_to(equal(scenario.place, done.wait(), scenario.reference(scenario.place.layout, scenario.steps)))
