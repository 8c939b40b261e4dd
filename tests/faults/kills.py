"""Kills, stops and signals: of ranks, of the launcher, of all; at random instants and at named points."""

import contextlib
import os
import re
import signal
import time

from tests.faults.place import LONG, SHORT, Ended, Started
from tests.faults.scenario import Defect, Scenario, clean, last_row, newest, wait_for_row
from tests.faults.verdict import left_running

RESUMED = re.compile(r"resumed after step (\d+)")
SAVED = re.compile(r"after step (\d+); saved")
STARTING = 3.0  # seconds in which a run has probably begun to train
LAST = 92  # the last step after which there is time to do something to a long run


def ranks_killed(scenario: Scenario) -> None:
    """One long run, in which ranks are killed again and again; elastic restarts them."""
    rng, place = scenario.rng, scenario.place
    started = place.start(*LONG)
    promised: list[tuple[int, int]] = []  # (how many resumptions there were, the newest checkpoint) at each kill
    for _ in range(rng.randint(6, 12)):
        if rng.random() < 0.7:
            steps = last_row(place) + rng.randint(1, 12)
            if steps > LAST or not wait_for_row(place, started, steps):
                break
            time.sleep(rng.uniform(0, 0.03))
        else:
            time.sleep(rng.uniform(0, STARTING))
        ranks = place.ranks()
        if started.ended() or not ranks:
            continue
        promised.append((len(RESUMED.findall(started.text())), newest(place)))
        victims = ranks if rng.random() < 0.2 else [rng.choice(ranks)]
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        scenario.plant(f"{'all ranks' if len(victims) > 1 else 'a rank'}: {signal.Signals(number).name}")
    ended = started.wait()
    resumed = [int(step) for step in RESUMED.findall(ended.text)]
    for index, step in promised:
        if index < len(resumed) and resumed[index] < step:
            raise Defect(f"steps were lost: step {step} was saved, and the run went on from {resumed[index]}")
    scenario.finishes(steps=LONG, ended=ended)


def launcher_killed(scenario: Scenario) -> None:
    """The launcher, or it and all ranks at once, are killed, and the command is given again."""
    rng, place = scenario.rng, scenario.place
    for _ in range(rng.randint(3, 5)):
        started = place.start(*LONG, cold=rng.random() < 0.15)
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, STARTING))
        elif wait_for_row(place, started, min(last_row(place) + rng.randint(1, 30), LAST)):
            time.sleep(rng.uniform(0, 0.03))
        if started.ended():
            break
        saved, everyone = newest(place), rng.random() < 0.4
        for pid in [*(place.processes() if everyone else []), started.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        scenario.plant("launcher and ranks: SIGKILL" if everyone else "launcher: SIGKILL")
        started.wait()
        if left := left_running(place):
            raise Defect(f"{len(left)} process(es) outlive their launcher")
        if newest(place) < saved:
            raise Defect(f"the checkpoint of step {saved} is gone")
    scenario.finishes(steps=LONG)


def at_a_point(scenario: Scenario) -> None:
    """A process is killed at a named point, by an audit hook, and the command is given again if need be."""
    who, ended = scenario.at_a_point("SIGKILL")
    if who == "rank" and ended.code != 0:
        raise Defect(f"the ranks were not restarted: exit code {ended.code}: {ended.text[-1500:]}")
    scenario.finishes(steps=SHORT, ended=None if who == "launcher" else ended)


def told_at_a_point(scenario: Scenario) -> None:
    """The launcher is told to stop at a named point."""
    who, ended = scenario.at_a_point("SIGTERM", whom=("launcher",))
    if who is not None:
        clean_stop(scenario, ended, signal.SIGTERM)
    scenario.finishes(steps=SHORT, ended=ended if ended.code == 0 else None)


def signalled(scenario: Scenario) -> None:
    """A run is told to stop: by one signal or several, to the launcher, to a rank or to all, at any moment."""
    rng, place = scenario.rng, scenario.place
    started = place.start(*LONG, cold=rng.random() < 0.15)
    if rng.random() < 0.4:
        time.sleep(rng.uniform(0, STARTING))
    elif wait_for_row(place, started, rng.randint(1, LAST)):
        time.sleep(rng.uniform(0, 0.03))
    if started.ended():
        scenario.finishes(steps=LONG, ended=started.wait())
        return
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2])
    times = rng.choice([1, 1, 2, 3]) if number == signal.SIGINT else 1
    target = rng.choice(["launcher", "group", "rank"])
    for again in range(times):
        if again:
            time.sleep(rng.uniform(0.02, 0.4))
        if target == "group":
            for pid in place.processes():  # as a terminal signals its foreground group
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif target == "rank" and (ranks := place.ranks()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(ranks), number)
        else:
            target = "launcher"
            started.signal(number)
    scenario.plant(f"{target}: {' '.join([number.name] * times)}")
    ended = started.wait()
    clean_stop(scenario, ended, number)
    scenario.finishes(steps=LONG, ended=ended if ended.code == 0 else None)


def clean_stop(scenario: Scenario, ended: Ended, number: signal.Signals) -> None:
    """The exit code is the signal's, and what it says of saved steps is true."""
    if ended.code not in (0, 128 + number, -number):
        raise Defect(f"exit code {ended.code} after {number.name}: {ended.text[-1500:]}")
    for step in SAVED.findall(ended.text):
        if not (scenario.place.run_folder / "checkpoints" / f"step-{step}" / "manifest.json").is_file():
            raise Defect(f"it says that step {step} is saved, and it is not: {ended.text[-600:]}")
    if left := left_running(scenario.place):
        raise Defect(f"{len(left)} process(es) left over after {number.name}")
    if ended.code >= 0:
        clean(scenario.place, ended)


def frozen(scenario: Scenario) -> None:
    """A rank is stopped for a while and goes on; or for good, which its peers must find out."""
    rng, place = scenario.rng, scenario.place
    good = place.layout == "one process" or rng.random() < 0.5
    started = place.start(*LONG, "launch.timeout_seconds=8", "launch.grace_seconds=3")
    if not wait_for_row(place, started, rng.randint(1, 80)):
        raise Defect(f"it ended early: {started.text()[-1500:]}")
    ranks = place.ranks()
    if not ranks:
        scenario.finishes(steps=LONG, ended=started.wait())
        return
    victim = rng.choice(ranks)
    os.kill(victim, signal.SIGSTOP)
    scenario.plant(f"a rank: stopped {'for a while' if good else 'for good'}")
    if good:
        time.sleep(rng.uniform(0.2, 3))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    scenario.finishes(steps=LONG, ended=_within(started, 90))


def _within(started: Started, seconds: float) -> Ended:
    try:
        return started.wait(seconds)
    except TimeoutError as error:
        raise Defect(str(error)) from None
