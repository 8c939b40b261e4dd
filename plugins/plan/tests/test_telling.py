"""While something takes long, a line is said again and again, by one voice."""

import queue

from plait_plan.telling import Telling


def test_the_innermost_says_that_it_is_still_at_work() -> None:
    said: queue.Queue[str] = queue.Queue()
    with Telling(lambda seconds: f"outer {seconds >= 0}", said.put, every=0.001):
        assert said.get(timeout=60) == "outer True"
        with Telling(lambda seconds: "inner", said.put, every=0.001) as tell:
            while said.get(timeout=60) != "inner":  # the outer one may have begun to speak
                pass
            assert [said.get(timeout=60) for _ in range(5)] == ["inner"] * 5
            tell("a line")
            while said.get(timeout=60) != "a line":
                pass
        while said.get(timeout=60) != "outer True":
            pass


def test_who_speaks_often_is_not_interrupted() -> None:
    said: list[str] = []
    with Telling(lambda seconds: "still", said.append, every=1e6) as tell:
        for number in range(3):
            tell(str(number))
    assert said == ["0", "1", "2"]
