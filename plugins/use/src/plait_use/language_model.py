"""A trained model as lm-eval asks one: how likely a text is, and what it writes. Needs lm-eval."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from plait import IGNORE, Applied, Batch, Config, whole_tensor
from plait.host import build_source, load_model
from plait_use.next_token import Draw, NextToken

WRITTEN = 256  # tokens of an answer at most, if a task does not say


class LanguageModel(TemplateLM):
    """All ranks answer all requests together, in the order of the task. source: of the run's data."""

    def __init__(self, applied: Applied, source: Any, longest: int) -> None:
        super().__init__()
        self._applied, self._source, self._longest = applied, source, longest
        self._ends, self._begin = source.special_ids()
        self._next = NextToken(applied, longest, source.vocabulary)

    @property
    def eot_token_id(self) -> int:
        return int(self._ends[0])

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text of which the first token counts, too."""
        return self.eot_token_id if self._begin is None else int(self._begin)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self._source.encoded(string))

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return [self.likelihood(context, said) for _, context, said in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        sums = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            ids = ids[1:] if ids[:1] == [self.prefix_token_id] else ids
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self._longest, 1)
            sums.append(sum(self.likelihood(*make_disjoint_window(each))[0] for each in windows))
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._answer(number, *request.args) for number, request in enumerate(requests)]

    def _answer(self, number: int, context: str, options: Mapping[str, Any]) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        room = int(options.get("max_gen_toks", WRITTEN))
        draw = Draw(float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0)
        ids = self.tok_encode(context)[-max(self._longest - room, 1) :]
        begin, text = str(self._source.decoded(ids)), ""
        for place in range(min(room, self._longest - len(ids))):
            ids.append(self._next(ids, draw, number, place))
            if ids[-1] in self._ends:
                break
            text = str(self._source.decoded(ids)).removeprefix(begin)
            if any(stop in text for stop in until):
                break
        return min((text.partition(stop)[0] for stop in until), key=len, default=text)

    @torch.no_grad()
    def likelihood(self, context: Sequence[int], said: Sequence[int]) -> tuple[float, bool]:
        """(the natural logarithm of the probability of the tokens `said` after `context`, whether each is the most
        likely one), on all ranks, which call this together. Of what is longer than a sample its end counts."""
        ids = [*context, *said][-self._longest - 1 :]
        count = min(len(said), len(ids) - 1)
        window, last = self._next.window(len(ids) - 1), len(ids) - 1
        tokens, labels = torch.zeros(1, window, dtype=torch.int64), torch.full((1, window), IGNORE)
        tokens[0, :last] = torch.tensor(ids[:-1])
        labels[0, last - count : last] = torch.tensor(ids[-count:])
        batch = self._applied.deal(Batch(tokens, labels))
        at = torch.arange(window) if batch.positions is None else batch.positions[0].cpu()
        found = torch.full((2, window), torch.nan, dtype=torch.float64)

        def scores(logits: Tensor, labels: Tensor) -> Tensor:
            here = (labels[0] != IGNORE).nonzero().flatten().tolist()
            if here:
                part = slice(here[0], here[-1] + 1)
                rows = whole_tensor(logits[:, part])[0, :, : self._source.vocabulary].to("cpu", torch.float64)
                own = labels[0, part].cpu()
                for row, label, place in zip(rows, own, at[part], strict=True):
                    if label != IGNORE:
                        found[0, place], found[1, place] = row.log_softmax(0)[label], row.argmax() == label
            return torch.zeros((), device=labels.device)

        self._applied.forward_backward([batch.to(self._applied.device)], 1, scores)
        every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(every, found)
        merged = every[0]
        for each in every[1:]:  # of ranks with the same part of the text the first counts
            merged = torch.where(merged.isnan(), each, merged)
        values = merged[:, last - count : last]
        return float(values[0].sum()), bool(values[1].all())


def tasks_of(folder: str | None) -> TaskManager:
    """lm-eval's tasks; those of `folder`, if it is given."""
    return TaskManager(include_path=folder, include_defaults=folder is None)


def answered(
    config: Config,
    checkpoint: str | None,
    tasks: Sequence[str],
    folder: str | None,
    shots: int | None,
    limit: int | None,
) -> dict[str, dict[str, Any]]:
    """Task -> its results, as lm-eval names them, on rank 0. Called by all ranks."""
    from lm_eval import simple_evaluate

    model = LanguageModel(load_model(config, checkpoint), build_source(config.data), config.train.seq_len)
    options = {"num_fewshot": shots, "limit": limit, "log_samples": False, "bootstrap_iters": 1000}
    done = simple_evaluate(model, tasks=list(tasks), task_manager=tasks_of(folder), **options)
    rows = done["results"] if done else {}  # lm-eval returns None on ranks after its first; here each is one
    return {name: {k: v for k, v in row.items() if isinstance(v, int | float)} for name, row in rows.items()}
