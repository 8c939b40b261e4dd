"""What pruners say of a job of a sweep, and what the sweep's table keeps of it."""

from types import SimpleNamespace

import pytest

from plait import PlaitError
from plait.host import compose
from plait.records.ledger import Job
from plait.sweep import prune

FIGURES = {"planned_memory_bytes": 2**30, "planned_tokens_per_second": [8.0, 9.0]}


@pytest.fixture
def asked(monkeypatch):
    """asked(**pruners): what `cannot_work` says of a job if these are installed, its record, and who was asked.

    pruners: name -> (what it reports for the sweep, what it answers).
    """

    def asked(*overrides, **pruners):
        job, seen = Job(0, "0", "running"), []

        def loaded(name, kind):
            def cannot_work(checked):
                seen.append(name)
                reports, answer = pruners[name]
                checked.assembly.run.reports["sweep"] = reports
                return answer

            return SimpleNamespace(cannot_work=cannot_work)

        monkeypatch.setattr(prune, "installed", lambda kind: pruners)
        monkeypatch.setattr(prune, "load", loaded)
        return prune.cannot_work(job, compose(["strategy=[]", "launch.device=cpu", *overrides])), job, seen

    return asked


def test_the_first_pruner_with_a_reason_decides(asked):
    reason, job, seen = asked(a=(FIGURES, ""), b=({}, "it is too large"), c=({}, "it is too slow"))
    assert (reason, seen) == ("it is too large", ["a", "b"])
    assert (job.planned_memory_bytes, job.planned_tokens_per_second) == (2**30, [8.0, 9.0]), "what nobody changed stays"


def test_a_job_may_work_if_no_pruner_has_a_reason(asked):
    reason, job, seen = asked(a=({}, ""), b=(FIGURES, ""))
    assert (reason, seen) == ("", ["a", "b"])
    assert (job.planned_memory_bytes, job.planned_tokens_per_second) == (2**30, [8.0, 9.0])


def test_what_does_not_fit_cannot_work_whatever_pruners_say(asked):
    reason, _, seen = asked("train.local_batch_size=3", "train.global_batch_size=4", a=({}, ""))
    assert "local_batch_size" in reason
    assert seen == []


def test_a_pruner_answers_with_a_text(asked):
    with pytest.raises(PlaitError, match="pruner 'a' answered None, not a text"):
        asked(a=({}, None))
