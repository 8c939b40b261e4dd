"""A pool of rank processes, started once: starting ranks for every test would cost 10 seconds each."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from plait.host import Scratch, forget_plans
from plait_testing.propagated import keep
from plait_testing.torch_internals import PRELOADED, forget_compiled

OF_SUITES = (  # what ranks import for suites
    *PRELOADED,
    *("plait_testing.suite", "plait_testing.optimizer_suite", "plait_testing.whole_run", "plait_testing.leaks"),
    *("plait_models.llama3", "plait_models.deepseek_v3"),
)
# torch 2.11's compiler asks for GPUs when it is imported. Asked by the CUDA runtime, no fork may use a GPU afterwards.
COUNTED_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
RUNS = 100  # of one set of ranks
STACKS = getattr(signal, "SIGRTMIN", signal.SIGQUIT)  # makes a rank write its stacks; runs handle the usual signals


class RankError(Exception):
    """A rank failed; the message holds what it raised and its traceback, or for a hang every rank's stack."""


class TooFewDevices(RankError):
    """More ranks than GPUs; the pytest plugin skips a test that asks for them."""


class Pool:
    """`size` processes that run a function as the ranks of a world of any size up to that.

    >>> pool.run(train, 3, world=2)   # [train(3) on rank 0, train(3) on rank 1]

    imports: modules that all ranks import as they start, beside what the first ones are already asked to do.
    preload: modules that the process imports of which ranks are forks, if this pool is the first in this process.
    """

    def __init__(
        self,
        size: int = 4,
        backend: str = "gloo",
        timeout: float = 120.0,
        imports: Sequence[str] = (),
        preload: Sequence[str] = PRELOADED,
    ) -> None:
        self.size, self.backend, self.timeout, self.imports, self.preload = size, backend, timeout, imports, preload
        self.kept: dict[str, Any] = {}  # answers that tests share
        self._scratch = Scratch()
        self.folder = self._scratch.path
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._runs = 0

    def run(
        self, fn: Callable[..., Any], *args: Any, world: int, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """What `fn(*args, **kwargs)` returns on each rank of a group of `world` ranks, by rank.

        Raises RankError: first a line for each rank that failed, in that order, then their tracebacks; after `timeout`
        seconds the stacks of all, and the pool then starts new ranks.
        """
        if self.backend == "nccl" and world > (gpus := _gpus()):
            raise TooFewDevices(f"{world} ranks need a GPU each, but there are {gpus}")
        if not all(process.is_alive() for process, _ in self._ranks):
            self._kill()  # one was ended between two calls, for example because the machine ran out of memory
        if self._runs and self._runs % RUNS == 0:
            self._kill()  # torch's caches grow with every run, above all compiled ones
        if not self._ranks:
            self._start()
        self._runs += 1
        store = str(self.folder / f"store-{self._runs}")
        payload = cloudpickle.dumps((fn, args, kwargs))
        for _, pipe in self._ranks[:world]:
            pipe.send((payload, world, store))
        seconds = self.timeout if timeout is None else timeout
        try:
            answers, why = self._answers(world, seconds)
        except BaseException:
            self._kill()  # pytest-timeout or Ctrl-C: the ranks are still at work, and the next test needs free ones
            raise
        by_time = sorted(answers.items(), key=lambda item: item[1][2])  # the first that failed first
        failed = {rank: text for rank, (fine, text, _) in by_time if not fine}
        missing = sorted(set(range(world)) - set(answers))
        said = [f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in failed.items()]
        whole = [f"rank {rank}: {text}" for rank, text in failed.items()]
        if missing:
            said.append(f"ranks {missing} {why}")
            whole.append(self._stacks())
            self._kill()
        if said:
            raise RankError("\n".join([*said, *whole]))
        return [cloudpickle.loads(answers[rank][1]) for rank in range(world)]

    def once(self, fn: Callable[..., Any], *args: Any, world: int, name: str = "", **options: Any) -> list[Any]:
        """Like `run`, but the ranks compute the answer to one question once per session: tests share it.

        `name` stands for `fn` if its own representation does not say what it computes.
        """
        key = repr((name or f"{fn.__module__}.{fn.__qualname__}", args, world))
        if key not in self.kept:
            self.kept[key] = self.run(fn, *args, world=world, **options)
        return self.kept[key]

    def _answers(self, world: int, seconds: float) -> tuple[dict[int, tuple[bool, Any, float]], str]:
        """What the ranks answered within `seconds`, and when, by rank; and why others did not. Time in which a rank,
        or this process, could run and got no core is not counted: on a busy machine all are late, and none hangs."""
        answers: dict[int, tuple[bool, Any, float]] = {}
        pids = [os.getpid(), *(process.pid for process, _ in self._ranks[:world])]
        before = [_starved_seconds(pid) for pid in pids]
        deadline = time.monotonic() + seconds

        def is_late() -> bool:
            if time.monotonic() < deadline:
                return False
            own, *ranks = (_starved_seconds(pid) - at_start for pid, at_start in zip(pids, before, strict=True))
            return time.monotonic() >= deadline + own + max(ranks)

        why = f"did not answer within {seconds:g} s: they hang"
        while len(answers) < world and not is_late():
            for rank, (process, pipe) in enumerate(self._ranks[:world]):
                if rank not in answers and pipe.poll(0.005):
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        process.join(1)  # else it has no exit code yet
                        stack = (self.folder / f"rank-{rank}.stack").read_text(encoding="utf-8")  # if it crashed
                        answers[rank] = (
                            False,
                            f"{stack}the process of rank {rank} died (exit code {process.exitcode})",
                            0.0,  # before those who lost it, who fail at once
                        )
                    if not answers[rank][0]:
                        deadline = min(deadline, time.monotonic() + 5)  # the others may wait for it for ever
                        why = "were still waiting for it"
        return answers, why

    @contextlib.contextmanager
    def fresh(self, world: int) -> "Iterator[Pool]":
        """A pool of fresh processes, for as long as it is needed."""
        pool = Pool(world, self.backend, self.timeout)
        try:
            yield pool
        finally:
            pool.close()

    def close(self) -> None:
        """End the ranks, which have nothing left to do or to write: they wait for work, and end by themselves."""
        for _, pipe in self._ranks:
            pipe.close()
        deadline = time.monotonic() + 2
        for process, _ in self._ranks:
            process.join(max(deadline - time.monotonic(), 0))
        self._kill()
        self._scratch.close()

    def _start(self) -> None:
        context = begin(self.preload)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, theirs, str(self.folder / f"rank-{rank}.stack"), self.backend, self.imports),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _kill(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def _stacks(self) -> str:
        for pid in [process.pid for process, _ in self._ranks if process.pid]:
            with contextlib.suppress(ProcessLookupError):  # it has crashed
                os.kill(pid, STACKS)
        files, deadline = sorted(self.folder.glob("*.stack")), time.monotonic() + 10
        while not all(file.stat().st_size for file in files) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)  # until each has written all of it
        return "\n".join(f"{file.stem}:\n{file.read_text(encoding='utf-8')}" for file in files)


def begin(preload: Sequence[str] = PRELOADED) -> Any:
    """Starts the process whose forks are ranks, which imports torch while the caller goes on; returns multiprocessing's
    context that makes them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(COUNTED_BY_NVML, "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ranks inherit it: Ctrl-C is for their parent
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)
    return context


def _starved_seconds(pid: int | None) -> float:
    """Seconds that the main thread of a process was ready to run and had no core, so far; 0 where no kernel tells."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _serve(rank: int, pipe: Connection, stack_file: str, backend: str, imports: Sequence[str]) -> None:
    """A rank: waits for functions, and runs each inside its own process group."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:  # nobody else can reach the ranks
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU, whatever devices there are
    import faulthandler

    stacks = open(stack_file, "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(stacks)  # if it crashes
    faulthandler.register(STACKS, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for module in imports:
        with contextlib.suppress(Exception):  # what needs it raises it again, and is answered
            importlib.import_module(module)
    keep()
    gc.freeze()  # existing objects stay: no collection needs to look at them
    while True:
        try:
            payload, world, store = pipe.recv()
        except EOFError:
            return
        try:
            _join(backend, dist.FileStore(store, world), rank, world)
            dist.barrier()  # one that fails at once ends its group: others, not yet connected, could never join again
            fn, args, kwargs = cloudpickle.loads(payload)
            answer = cloudpickle.dumps(fn(*args, **kwargs))
            dist.barrier()
            dist.destroy_process_group()
            pipe.send((True, answer, time.monotonic()))
        except BaseException:
            pipe.send((False, traceback.format_exc(), time.monotonic()))
            if dist.is_initialized():
                dist.destroy_process_group()
        _forget()


def _gpus() -> int:
    import torch

    return torch.accelerator.device_count()


def _join(backend: str, store: Any, rank: int, world: int) -> None:
    """gloo: ranks on the CPU. nccl: one GPU each."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        os.environ["LOCAL_RANK"] = str(rank)
        torch.accelerator.set_device_index(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _forget() -> None:
    """torch caches plans of DTensors and compiled code by equal-looking meshes, with the names of ended groups."""
    forget_plans()
    forget_compiled()
    gc.collect()  # models and meshes reference each other, and with them sockets and threads of ended groups
    gc.freeze()  # what is left was imported or cached, and stays
