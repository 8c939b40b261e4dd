"""The run meets another: two at once on one name, and other settings when it is resumed."""

import shutil
import time

from tests.faults.place import SHORT, digests
from tests.faults.scenario import Defect, Scenario, wait_for_row
from tests.faults.verdict import clean, refused

REFUSED = {  # what a run cannot go on with
    "another width": ("model.dim=64",),
    "another depth": ("model.n_layers=3",),
    "another optimizer": ("optimizer=sgd",),
    "tied embeddings": ("model.tie_embeddings=true",),
    "no loading": ("checkpoint.load=never",),
    "nothing saved": ("checkpoint.enabled=false",),
    "a batch that does not divide": ("train.global_batch_size=7",),
}
EQUAL = {  # what makes no difference to the numbers
    "other saving": ("checkpoint.interval=3", "checkpoint.keep=4"),
    "sync": ("checkpoint.mode=sync",),
    "other logging": ("metrics.log_every=1",),
    "other limits": ("launch.max_restarts=0", "launch.timeout_seconds=120"),
    "a profile": ("profile.enabled=true", "profile.start=20", "profile.steps=1"),
    "tensorboard": ("metrics.tensorboard=true",),
}


def together(scenario: Scenario) -> None:
    """Two or three starts of one command at nearly the same time: one trains, the others are turned away."""
    rng, place = scenario.rng, scenario.place
    started = []
    for _ in range(rng.randint(2, 3)):
        started.append(place.start(*SHORT))
        time.sleep(rng.choice([0, 0, rng.uniform(0, 4)]))
    scenario.plant(f"{len(started)} starts at once")
    ended = [one.wait() for one in started]
    won = [one for one in ended if one.code == 0]
    if not won:
        raise Defect(f"none of them trained: {' | '.join(one.sentence for one in ended)}")
    for one in ended:
        if one.code != 0 and "already running" not in one.sentence:
            raise Defect(f"turned away for another reason: {one.sentence or one.text[-600:]}")
    clean(place, *ended)
    scenario.finishes(steps=SHORT, ended=won[0])


def while_training(scenario: Scenario) -> None:
    """A second start while the first trains is refused, and changes nothing of it."""
    rng, place = scenario.rng, scenario.place
    started = place.start(*SHORT)
    if wait_for_row(place, started, rng.randint(1, 15)):
        second = place.run(*SHORT)
        scenario.plant("a second start while the first trains")
        if second.code == 0 and not started.ended():
            raise Defect(f"the second start was let in: {second.text[-600:]}")
        if second.code != 0 and "already running" not in second.sentence:
            raise Defect(f"turned away for another reason: {second.sentence or second.text[-600:]}")
    scenario.finishes(steps=SHORT, ended=started.wait())


def changed(scenario: Scenario) -> None:
    """A stopped run is resumed with another configuration."""
    rng, place = scenario.rng, scenario.place
    place.work.rmdir()
    shutil.copytree(scenario.base(place.layout, False), place.work)
    name = rng.choice([*REFUSED, *EQUAL])
    scenario.plant(f"resumed with {name}")
    if name in EQUAL:
        ended = place.run(*SHORT, *EQUAL[name])
        for extra in ("profile", "tensorboard"):
            shutil.rmtree(place.run_folder / extra, ignore_errors=True)
        scenario.finishes(steps=SHORT, ended=ended)
        return
    before = digests(place.work)
    ended = place.run(*SHORT, *REFUSED[name])
    verdict = refused(place, ended)
    after = digests(place.work)
    odd = [n for n in {**before, **after} if before.get(n) != after.get(n) and "ranks/" not in n and ".lock" not in n]
    if odd:
        raise Defect(f"the refused start changed {', '.join(sorted(odd)[:5])}; it said: {ended.sentence}")
    scenario.came_to(verdict)
    scenario.finishes(steps=SHORT)
