"""The table at the end of a sweep."""

from plait.records import text
from plait.records.ledger import Job
from plait.records.text import gib, loss, quantity

HEADS = (
    *("job", "state", "loss", "val_loss", "tokens/s", "planned tokens/s", "memory", "planned memory"),
    *("overrides", "reason"),
)


def table(jobs: list[Job]) -> str:
    """Aligned lines, one per job; a column without values is left out."""
    rows = [_row(job) for job in jobs]
    kept = [i for i in range(len(HEADS)) if i < 2 or any(row[i] != "-" for row in rows)]
    cells = [[row[i] for i in kept] for row in [HEADS, *rows]]
    return "\n".join(text.table(cells))


def _row(job: Job) -> tuple[str, ...]:
    planned = job.planned_tokens_per_second
    return (
        str(job.job),
        job.state,
        loss(job.loss),
        loss(job.val_loss),
        quantity(job.tokens_per_second),
        " to ".join(map(quantity, planned)) if planned else "-",
        gib(job.peak_memory_bytes),
        gib(job.planned_memory_bytes),
        ", ".join(job.overrides) or "-",
        (job.reason if job.state != "finished" else "") or "-",
    )
