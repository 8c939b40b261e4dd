"""The answers of a comparison: as a text, as JSON, and as SARIF for the tools of CI."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import attrs

from plait_testing.foreign.asked import WORDS, Answer
from plait_testing.foreign.astray import Astray
from plait_testing.foreign.bisected import Diverged
from plait_testing.foreign.causes import Cause
from plait_testing.foreign.subject import Comparison

SHOWN = 5
AGREES, WRONG, NOT_COMPARED = 0, 1, 2  # exit codes


@attrs.frozen
class First:
    """The first wrong parameter in the order of forward. off: how far, relative. lies: how it lies on the ranks.
    others: how many gradients are wrong, and of how many. last: the last wrong one in that order."""

    question: str
    parameter: str
    off: float
    bound: float
    lies: str
    cause: Cause
    others: tuple[int, int]
    last: str
    last_cause: Cause | None = None


@attrs.frozen
class Report:
    """What a comparison found.

    comparison: what was compared. model, parameters: its class, and how many elements its parameters have.
    answers:    one for each question: its `key`, and its `status`: "ok", "wrong" or "skipped".
    first:      the first wrong parameter in forward order, in the first question with wrong gradients: its `parameter`,
                `off`, `lies` and `cause`, which has `kind`, `axis`, `factor` and `sentence`.
    forward:    where activations first differ, if the loss does: the `module`, and the one `before` that agrees.
    backward:   where gradients of activations first go wrong, if no pattern of the parameter's gradient fits: the
                `module`, `what` it gets or returns, and what is right `after` it, in backward's order.
    seconds:    of one process, and of the ranks.
    """

    comparison: Comparison
    model: str
    parameters: int
    answers: Sequence[Answer]
    first: First | None = None
    forward: Diverged | None = None
    backward: Astray | None = None
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def agrees(self) -> bool:
        """Whether all that was asked agrees."""
        return all(answer.fine for answer in self.answers)

    @property
    def exit_code(self) -> int:
        """0: everything that was asked agrees. 1: something is wrong."""
        return AGREES if self.agrees else WRONG

    def head(self) -> list[str]:
        """What is compared, in lines."""
        c = self.comparison
        axes = ", ".join(f"{axis}={size}" for axis, size in c.mesh.items())
        split = f"rows divided over {', '.join(c.data_axes)}" if c.data_ranks > 1 else "all ranks get the same rows"
        return [
            f"model   {self.model}, {self.parameters:,} parameters, in {c.dtype}",
            f"ranks   {c.world}: {axes}; {split}",
        ]

    def text(self) -> str:
        """For people."""
        lines = [*self.head(), "", *map(_line, sorted(self.answers, key=_place)), ""]
        if self.first is not None:
            lines += _told(self.first)
        if self.forward is not None:
            lines += [sentence(self.forward)]
        if self.backward is not None:
            lines += [_astray(self.backward)]
        lines.append("what was asked agrees" if self.agrees else "the ranks do not compute what one process computes")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """For programs: plain values."""
        c, first = self.comparison, self.first
        return {
            "agrees": self.agrees,
            "model": self.model,
            "parameters": self.parameters,
            "dtype": c.dtype,
            "mesh": dict(c.mesh),
            "answers": [_plain(answer) for answer in sorted(self.answers, key=_place)],
            "first": first and {**attrs.asdict(first), "others": list(first.others)},
            "forward": self.forward and attrs.asdict(self.forward),
            "backward": self.backward and attrs.asdict(self.backward),
            "seconds": {"one process": self.seconds[0], "ranks": self.seconds[1]},
        }

    def sarif(self, file: str = "", line: int = 1) -> dict[str, Any]:
        """As SARIF 2.1.0: a result for each wrong answer. file, line: where the comparison is defined."""
        place = {"physicalLocation": {"artifactLocation": {"uri": file}, "region": {"startLine": line}}}
        results = [
            {
                "ruleId": answer.key,
                "level": "error",
                "message": {"text": self._message(answer)},
                "locations": [place] if file else [],
            }
            for answer in self.answers
            if not answer.fine
        ]
        rules = [{"id": key, "shortDescription": {"text": words}} for key, words in WORDS.items()]
        about = {"version": version("plait-testing"), "informationUri": "https://github.com/plait-train/plait"}
        driver = {"name": "plait verify", **about, "rules": rules}
        return {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{"tool": {"driver": driver}, "results": results}],
        }

    def _message(self, answer: Answer) -> str:
        said = _line(answer).partition(" ")[2].strip()
        if self.first is not None and self.first.question == answer.key:
            said = " ".join([said + ".", *(line.strip() for line in _told(self.first) if line)])
        return said


def _place(answer: Answer) -> int:
    return ["initial", "loss", "gradients", *WORDS].index(answer.key)


def _line(answer: Answer) -> str:
    what = f"{WORDS[answer.key]:<38}"
    if answer.raised:
        return f"WRONG  {what} the ranks raised {answer.raised}"
    if answer.skipped or answer.finding is None:
        return f"-      {what} not asked: {answer.skipped}"
    found = answer.finding
    if found.fine:
        how = f"off by {found.error:.1e} (bound {found.bound:.0e})" if found.bound else "bitwise equal"
        return f"ok     {what} {how}"
    bound = f"bound {found.bound:.0e}" if found.bound else "must be bitwise equal"
    many = f", {len(found.wrong)} of {found.count} are wrong" if found.wrong else ""
    return f"WRONG  {what} off by {found.error:.1e} ({bound}), worst at {found.at}{many}"


def _told(first: First) -> list[str]:
    wrong, count = first.others
    rest = "" if wrong == 1 else f"; the last is {first.last}"
    lines = [
        f"{WORDS[first.question]}: {wrong} of {count} are wrong; the first in forward order is {first.parameter}{rest}",
        f"  off by {first.off:.2g} (bound {first.bound:.0e}); it lies as: {first.lies}",
        f"  {first.cause.sentence}",
    ]
    if first.last_cause is not None:
        why = "" if first.last_cause == first.cause else f": {first.last_cause.sentence}"
        lines.append(f"  backward first goes wrong at {first.last}{why}")
    return lines


def sentence(forward: Diverged) -> str:
    after = f"; {forward.before}, before it, agrees" if forward.before else ""
    return (
        f"activations first differ in what {forward.module or 'the model'} ({forward.kind}) returns on rank "
        f"{forward.rank}, by {forward.off:.2g}{after}"
    )


def _astray(backward: Astray) -> str:
    after = f"; that of {backward.after}, before it in backward, is right" if backward.after else ""
    return f"backward first goes wrong in the gradient of {backward.what}, on rank {backward.rank}{after}"


def _plain(answer: Answer) -> dict[str, Any]:
    found, said = answer.finding, {"question": answer.key, "words": WORDS[answer.key], "status": answer.status}
    if answer.raised or found is None:
        return {**said, "reason": answer.raised or answer.skipped}
    return {**said, "error": found.error, "bound": found.bound, "at": found.at, "wrong": dict(found.wrong)}


def dumped(content: dict[str, Any]) -> str:
    """JSON text; numbers that JSON has not become words."""
    return json.dumps(_finite(content), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return (
        str(value) if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))) else value
    )
