"""Who runs the experiments: local worker processes that may die without taking the sweep along.

A task is given to one worker at a time over a pipe, so that a death names its task. The task is tried once
more in a new process; a second death is a failure of that task alone. Tasks of one group share most of their
work, so a worker is given tasks of the group it knows for as long as there are any.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from tesserasim.errors import InputError

ATTEMPTS = 2
#: Linear algebra on one thread per worker: no oversubscription, and one order of summation on every machine.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work: `payload` is what the worker gets."""

    key: str
    group: Any
    payload: Any


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a task: the worker's answer, or why there is none."""

    key: str
    answer: Any = None
    error: str | None = None


class Work(Protocol):
    """What a worker process does; pickled to it once, keeps its caches between tasks."""

    def start(self) -> None:
        """Called in the worker process before its first task."""

    def stop(self) -> None:
        """Called after the last one, where a process may live on without work; `start` may follow."""

    def __call__(self, payload: Any, /) -> Any:
        """Do one task; an exception fails this task only."""


Executor = Callable[[Sequence[Task], Work, int], Iterator[Done]]


def executor(name: str) -> Executor:
    """The executor called `name`; InputError if it cannot be had."""
    if name == "local":
        return run_local
    package = {"dask": "distributed", "ray": "ray"}.get(name)
    if package is None:
        raise InputError(f"executor {name!r} is unknown; known: local, dask, ray")
    if importlib.util.find_spec(package) is None:
        extra = "dask[distributed]" if name == "dask" else "ray"
        raise InputError(f"executor {name!r} needs a package that is not installed: pip install '{extra}'")
    from tesserasim.sweep import remote

    found: Executor = remote.run_dask if name == "dask" else remote.run_ray
    return found


def describe(error: BaseException) -> str:
    """One line for an exception."""
    text = " ".join(str(error).split())
    return text if isinstance(error, InputError) and text else f"{type(error).__name__}: {text}"


def run_local(tasks: Sequence[Task], work: Work, jobs: int) -> Iterator[Done]:
    """Run `tasks` in up to `jobs` processes; yields each as it ends, in no particular order."""
    queue = list(tasks)
    attempts: dict[str, int] = {}
    pool = [_Worker(work) for _ in range(min(jobs, len(queue)))]
    try:
        while True:
            for worker in pool:
                if worker.task is None and queue:
                    worker.give(queue.pop(_choose(queue, worker, pool)))
            busy = {worker.pipe: worker for worker in pool if worker.task is not None}
            if not busy:
                return
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                task = worker.task
                assert task is not None
                try:
                    done = worker.result()
                except (EOFError, OSError):
                    attempts[task.key] = attempts.get(task.key, 0) + 1
                    reason = worker.post_mortem()
                    pool[pool.index(worker)] = _Worker(work)
                    if attempts[task.key] < ATTEMPTS:
                        queue.insert(0, task)
                        continue
                    done = Done(task.key, error=f"worker process died {attempts[task.key]} times ({reason})")
                yield done
    finally:
        for worker in pool:
            worker.stop()


def _choose(queue: Sequence[Task], worker: _Worker, pool: Sequence[_Worker]) -> int:
    """Index of the next task for `worker`: its own group, else a group nobody works on, else one to share.

    Whoever shares a group takes its tasks from the end, where the longest ones stand, and its owner goes on
    from the front: so both keep their caches, and no long task is left for the very end.
    """
    own = [i for i, task in enumerate(queue) if task.group == worker.group]
    if own:
        return own[-1] if worker.helps else own[0]
    taken = {w.group for w in pool if w is not worker and w.task is not None}
    for i, task in enumerate(queue):
        if task.group not in taken:
            worker.helps = False
            return i
    worker.helps = True
    return len(queue) - 1


@dataclass(eq=False)
class _Worker:
    """One process, its pipe, and the task it holds."""

    work: Work
    task: Task | None = None
    group: Any = None
    helps: bool = False  # with a group that another worker began
    process: BaseProcess = field(init=False)
    pipe: Connection = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.work, os.getpid()), daemon=True)
        with _environment(dict.fromkeys(_ONE_THREAD, "1")):
            self.process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        self.task, self.group = task, task.group
        with contextlib.suppress(OSError):  # a process that is already dead shows when its result is read
            self.pipe.send(task)

    def result(self) -> Done:
        done: Done = self.pipe.recv()
        self.task = None
        return done

    def post_mortem(self) -> str:
        self.process.join(10)
        code = self.process.exitcode
        self.stop()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(0.2 if self.task is None else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(pipe: Connection, work: Work, parent: int) -> None:
    """The worker process: tasks in, results out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    _die_with(parent)
    work.start()
    while True:
        try:
            task: Task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            done = Done(task.key, work(task.payload))
        except Exception as error:  # the task fails, the sweep goes on
            if os.environ.get("TESSERASIM_DEBUG"):
                import traceback

                traceback.print_exc()
            done = Done(task.key, error=describe(error))
        try:
            pipe.send(done)
        except OSError:
            return


def _die_with(parent: int) -> None:
    """On Linux: ask the kernel to end this process with its parent, even if that is killed."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
