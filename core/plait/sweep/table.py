"""The table at the end of a sweep."""

from plait.records.console import quantity
from plait.sweep.ledger import Job

HEADS = (
    *("job", "state", "loss", "val_loss", "tokens/s", "planned tokens/s", "memory", "planned memory"),
    *("overrides", "reason"),
)


def table(jobs: list[Job]) -> str:
    """Aligned lines, one per job; a column without values is left out."""
    rows = [_row(job) for job in jobs]
    kept = [i for i in range(len(HEADS)) if i < 2 or any(row[i] != "-" for row in rows)]
    cells = [[row[i] for i in kept] for row in [HEADS, *rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(kept))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _row(job: Job) -> tuple[str, ...]:
    planned = job.planned_tokens_per_second
    return (
        str(job.job),
        job.state,
        _loss(job.loss),
        _loss(job.val_loss),
        quantity(job.tokens_per_second),
        " to ".join(map(quantity, planned)) if planned else "-",
        _memory(job.peak_memory_bytes),
        _memory(job.planned_memory_bytes),
        ", ".join(job.overrides) or "-",
        (job.reason if job.state != "finished" else "") or "-",
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _memory(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"
