"""Traces of chosen steps on chosen ranks, in which blocks have their FQN and collectives their mesh axis."""

import json
import time
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, supported_activities

from plait.contract.config import Profile as Conf
from plait.contract.observer import RunObserver
from plait.records.flight_recorder import flight_record
from plait.system.disk import writing
from plait.system.errors import DiskError
from plait.system.torch_internals.memory import record_history, write_history
from plait.system.writable import can_be_written

if TYPE_CHECKING:
    from plait.parallel.applied import Applied

TraceEvent = dict[str, Any]


class Profiler(RunObserver):
    """`with Profiler(...) as profiler:` around the loop, `profiler.end(n)` after each step.

    On the ranks in `conf.ranks` it traces steps `conf.start` to `conf.start + conf.steps - 1` and writes them to
    `<folder>/profile/step-<first>-<last>-rank<rank>.json` (for Perfetto or chrome://tracing); with `conf.memory` it
    also writes the history of the GPU's allocator to a `.pickle` of the same name. On other ranks it installs nothing.

    parts: FQN -> module of what gets its name in the trace, such as blocks. axes: name of a process group -> axis, from
    `axes_by_group`. done: the step that the run continues from. say: gets a line when a trace is written.
    Raises PlaitError if `conf.memory` is set without a GPU.
    """

    def __init__(
        self,
        conf: Conf,
        folder: Path,
        rank: int,
        parts: Mapping[str, nn.Module],
        device_type: str,
        axes: Mapping[str, str] | None = None,
        done: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.conf, self.folder, self.rank, self.parts = conf, folder / "profile", rank, parts
        self.axes, self.done, self.say = dict(axes or {}), done, say
        self.first, self.last = max(conf.start, done + 1), conf.start + conf.steps - 1
        self.enabled = conf.enabled and rank in conf.ranks and self.last > done
        self.activities = {ProfilerActivity.CPU} if device_type == "cpu" else supported_activities()
        self._profile: profile | None = None
        self._hooks: list[Any] = []
        self._began = 0
        self._collectives: dict[tuple[int, int], dict[str, Any]] = {}

    @classmethod
    def of(cls, applied: "Applied", folder: Path, say: Callable[[str], None]) -> "Profiler":
        """For this rank of a run that continues from where `applied` is."""
        blocks = {fqn: block for part in applied.parts for fqn, block in applied.spec.blocks_of(part).items()}
        axes, rank, conf = applied.mesh.axes_by_group(), applied.mesh.rank, applied.run.config.profile
        return cls(conf, folder, rank, blocks, applied.device.type, axes, applied.steps, say)

    def __enter__(self) -> "Profiler":
        if self.enabled:
            self._offset = self.done + 1  # torch counts the steps that it has seen, from 0
            self._profile = profile(
                activities=self.activities,
                schedule=lambda index: self._action(self._offset + index),
                on_trace_ready=self._write,
                record_shapes=True,
                acc_events=False,
            )
            self._profile.start()
            self._follow(self.done)
        return self

    def end(self, step: int) -> None:
        if self._profile is None:
            return
        self._follow(step)
        self._profile.step()
        if step >= self.last:
            self.__exit__()

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            running, self._profile = self._profile, None
            running.stop()
        self._unhook()

    def _action(self, step: int) -> ProfilerAction:
        if self.first <= step <= self.last:
            return ProfilerAction.RECORD_AND_SAVE if step == self.last else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == self.first - 1 else ProfilerAction.NONE

    def _follow(self, done: int) -> None:
        """Hooks, and the flight recorder's entries before they are overwritten, for exactly the traced steps."""
        self.done = done
        if done + 1 == self.first:
            self._began = time.time_ns()
            for fqn, module in self.parts.items():
                self._hook(fqn, module)
            if self.conf.memory:
                record_history(entries=200_000)
        elif done >= self.first:
            for entry in flight_record():
                if entry["time_created_ns"] >= self._began:
                    self._collectives[entry["time_created_ns"], entry["record_id"]] = entry

    def _hook(self, fqn: str, module: nn.Module) -> None:
        running: list[record_function] = []

        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                running.append(record_function(fqn))
                running[-1].__enter__()

        def after(*_: Any) -> None:
            if running and not torch.compiler.is_compiling():
                running.pop().__exit__(None, None, None)

        # Outermost, so that what strategies do before and after a block counts as the block's.
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _write(self, running: profile) -> None:
        """If a trace cannot be written, says so and lets training continue."""
        path = self.folder / f"step-{self.first}-{max(self.done, self.first)}-rank{self.rank}.json"
        raw = path.with_suffix(".raw")
        try:
            with writing(path):
                self._write_to(path, raw, running)
            self.say(f"profile: steps {self.first} to {max(self.done, self.first)} in {path}")
        except DiskError as error:
            for part in [*self.folder.glob(f"{raw.name}*"), path.with_suffix(".pickle")]:
                part.unlink(missing_ok=True)
            self.say(f"profile: {error}; training continues")

    def _write_to(self, path: Path, raw: Path, running: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(raw))
        if not raw.exists():  # torch's profiler does not report its reason
            can_be_written(self.folder, "")
        trace = json.loads(raw.read_text(errors="replace", encoding="utf-8"), strict=False)
        name_all(trace, self.parts, self.axes, self._collectives.values(), self._offset)
        raw.write_text(json.dumps(trace), encoding="utf-8")
        raw.replace(path)
        if self.conf.memory:
            write_history(path.with_suffix(".pickle"))


def name_all(
    trace: dict[str, Any],
    blocks: Iterable[str],
    axes: Mapping[str, str],
    collectives: Iterable[Mapping[str, Any]] = (),
    offset: int = 0,
) -> None:
    """Adds names to a chrome trace, in place: steps, backward passes of `blocks`, axes and modules of collectives.

    collectives: entries of the flight recorder; they show which group a gloo operation belongs to, which the trace does
    not. nccl's events contain their group. offset: the number of the step that torch counts as 0.
    """
    events: list[TraceEvent] = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    host = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    for event in host:
        if event["name"].startswith("ProfilerStep#"):
            event["name"] = f"step {offset + int(event['name'].split('#')[1])}"
    backward = _backward(host, set(blocks))
    trace["traceEvents"] += backward
    annotations = [*backward, *(e for e in host if e["cat"] == "user_annotation")]
    operations = sorted((e for e in host if e["name"].startswith("c10d::")), key=lambda e: e["ts"])
    for operation, place in _innermost(annotations, operations):
        operation.setdefault("args", {})["within"] = place["name"]
    for event in events:
        if (group := event.get("args", {}).get("Process Group Name")) is not None:
            _name(event, axis_of(group, event["args"].get("Process Group Description", ""), axes))
    _name_by_time(host, operations, axes, collectives, trace.get("baseTimeNanoseconds", 0))


def axis_of(group: str, description: str, axes: Mapping[str, str]) -> str:
    """The axis of a process group; a group that joins several axes has its mesh's name, such as `data`."""
    if group in axes:
        return axes[group]
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    return "world" if description == "default_pg" else f"group {group}"


def _name(event: TraceEvent, axis: str) -> None:
    if "axis" not in event.setdefault("args", {}):
        event["name"] += f" [{axis}]"
        event["args"]["axis"] = axis


def _name_by_time(
    host: list[TraceEvent],
    operations: list[TraceEvent],
    axes: Mapping[str, str],
    collectives: Iterable[Mapping[str, Any]],
    base: int,
) -> None:
    """The recorder notes a collective during the operation that starts it; a thread of its group then runs it."""
    starts = [e["ts"] for e in operations]
    done = [e for e in sorted(host, key=lambda e: e["ts"]) if e["name"].startswith("gloo:")]
    waiting: dict[str, deque[TraceEvent]] = defaultdict(deque)
    for event in done:
        waiting[event["name"]].append(event)
    votes: dict[Any, Counter[str]] = defaultdict(Counter)
    for entry in sorted(collectives, key=lambda entry: entry["time_created_ns"]):
        noted = (entry["time_created_ns"] - base) / 1000
        group, description = entry["process_group"]
        axis = axis_of(group, description, axes)
        i = bisect_right(starts, noted) - 1
        if i >= 0 and noted <= starts[i] + operations[i]["dur"]:
            _name(operations[i], axis)
        queue = waiting[entry["profiling_name"]]
        while queue and (event := queue.popleft()):
            if event["ts"] >= noted:
                votes[event["tid"]][axis] += 1  # two groups may overtake each other, but a thread serves one group
                break
    for event in done:
        if votes[event["tid"]]:
            _name(event, votes[event["tid"]].most_common(1)[0][0])


def _backward(host: list[TraceEvent], blocks: set[str]) -> list[TraceEvent]:
    """Spans of the blocks' backward passes: autograd gives a node the number of the operation that created it."""
    makers: dict[int, TraceEvent] = {}
    for event in sorted(host, key=lambda e: e["ts"]):
        number = event.get("args", {}).get("Sequence number")
        if number is not None and not event["args"].get("Fwd thread id"):
            makers[number] = event  # others saw the number before it was used: the last one used it
    spans = [e for e in host if e["cat"] == "user_annotation" and e["name"] in blocks]
    owner = {maker["args"]["Sequence number"]: span for maker, span in _innermost(spans, list(makers.values()))}
    nodes = [e for e in host if e.get("args", {}).get("Fwd thread id") and e["args"].get("Sequence number") in owner]
    engine = [e for e in host if e["name"].startswith("autograd::engine::evaluate_function")]
    around = {id(node): evaluation for node, evaluation in _innermost(engine, nodes)}
    events: dict[tuple[int, Any], TraceEvent] = {}
    for node in nodes:
        span = owner[node["args"]["Sequence number"]]
        whole = around.get(id(node), node)
        event = events.setdefault(
            (id(span), node["tid"]),
            {**whole, "cat": "user_annotation", "name": f"{span['name']} backward", "args": {}},
        )
        start = min(event["ts"], whole["ts"])
        event["dur"] = max(event["ts"] + event["dur"], whole["ts"] + whole["dur"]) - start
        event["ts"] = start
    return list(events.values())


def _innermost(outer: Iterable[TraceEvent], inner: Iterable[TraceEvent]) -> list[tuple[TraceEvent, TraceEvent]]:
    """Pairs of an event of `inner` and the innermost event of `outer` that runs on its thread when it starts."""
    running: dict[Any, list[TraceEvent]] = defaultdict(list)
    pairs = []
    marked = [*((e["ts"], 0, -e["dur"], i, e) for i, e in enumerate(outer))]
    marked += [(e["ts"], 1, 0.0, i, e) for i, e in enumerate(inner)]
    for now, is_inner, _, _, event in sorted(marked):
        stack = running[event["pid"], event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] < now:
            stack.pop()
        if not is_inner:
            stack.append(event)
        elif stack:
            pairs.append((event, stack[-1]))
    return pairs
