"""`plait eval RUN tasks=...`: tasks of the library lm-eval."""

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Checked, Parser
    from plait_use.trained import Trained


def add_arguments(parser: "Parser") -> None:
    from plait.host import whole

    parser.add_value("tasks", "A,B", lambda names: names.split(","), "tasks of lm-eval, in place of data")
    parser.add_value("tasks_dir", "DIR", str, "a folder with tasks of your own, in place of lm-eval's")
    parser.add_value("shots", "N", whole("shots", "a whole number"), "solved examples before each question")
    parser.add_value("limit", "N", whole("limit", "a number of at least 1", 1), "questions of each task at most")


def run(args: "Namespace", trained: "Trained") -> int:
    from plait import PlaitError
    from plait.host import on_ranks

    if find_spec("lm_eval") is None:
        raise PlaitError("tasks= needs the library lm-eval: pip install 'plait-use[tasks]'").at("tasks", args.tasks)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    config = trained.for_logits

    def given(checked: "Checked") -> Mapping[str, Any]:
        checkpoint = trained.writes(checked)
        _check(args.tasks, args.tasks_dir, checked.source)
        asked = {"tasks": args.tasks, "folder": args.tasks_dir, "shots": args.shots, "limit": args.limit}
        return {"checkpoint": checkpoint, **asked}

    results = on_ranks(config, "plait_use.language_model:answered", given)
    told = {"model": str(trained.path), "step": trained.step, "tasks": results}
    print(json.dumps(told) if args.json else _table(trained, results))
    return 0


def _check(names: list[str], folder: str | None, source: Any) -> None:
    """Raises PlaitError for a task that does not exist, and for data without words."""
    from plait import PlaitError, near_miss
    from plait_use.language_model import tasks_of

    if not hasattr(source, "encoded") or not source.special_ids()[0]:
        raise PlaitError("tasks need a tokenizer with a token that ends texts: set data.tokenizer").at("data.tokenizer")
    known = tasks_of(folder).all_tasks
    for name in names:
        if name not in known:
            where = folder or "lm-eval"
            raise PlaitError(f"tasks={name}: {where} has no such task{near_miss(name, known)}").at("tasks", name)


def _table(trained: "Trained", results: Mapping[str, Mapping[str, float]]) -> str:
    from plait.host import text

    lines = [("task", "metric", "value", "standard error")]
    for task, row in results.items():
        for key, value in row.items():
            name = key.partition(",")[0]
            if name.endswith("_stderr") or name == "sample_len":
                continue
            error = row.get(key.replace(name, f"{name}_stderr", 1))
            lines.append((task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}"))
    return "\n".join([f"model: {trained}", *text.table(lines)])
