"""The same tasks on Dask or Ray: for machines that already run one. Results still go to the sweep's directory,
which all machines must share; a task whose worker is lost is tried once more by the framework.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tesserasim.sweep.executor import ATTEMPTS, Done, Task, Work, describe

_known: dict[str, Work] = {}  # in a worker process: what it has worked on, with its caches


def _do(work: Work, task: Task) -> Done:
    """Runs in a worker of the framework; caches live as long as its process."""
    work = _known.setdefault(repr(work), work)
    work.start()
    try:
        return Done(task.key, work(task.payload))
    except Exception as error:  # the task fails, the sweep goes on
        return Done(task.key, error=describe(error))
    finally:
        work.stop()  # this process may outlive the sweep


def run_dask(tasks: Sequence[Task], work: Work, jobs: int) -> Iterator[Done]:
    """On the Dask cluster of the environment (DASK_SCHEDULER_ADDRESS), else on one of `jobs` local processes."""
    dask: Any = importlib.import_module("dask")
    distributed: Any = importlib.import_module("distributed")
    if dask.config.get("scheduler-address", None):
        client = distributed.Client()
    else:
        client = distributed.Client(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
    with client:
        futures = {
            client.submit(_do, work, task, key=task.key, retries=ATTEMPTS - 1, pure=False): task.key
            for task in tasks
        }
        for future in distributed.as_completed(futures):
            error = future.exception()
            yield future.result() if error is None else Done(futures[future], error=describe(error))


def run_ray(tasks: Sequence[Task], work: Work, jobs: int) -> Iterator[Done]:
    """On the Ray cluster of the environment (RAY_ADDRESS), else on `jobs` local processes."""
    ray: Any = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(**({} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs, "include_dashboard": False}))
    remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_do)
    waiting = {remote.remote(work, task): task.key for task in tasks}
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1)
        for reference in ready:
            key = waiting.pop(reference)
            try:
                yield ray.get(reference)
            except Exception as error:  # the worker was lost twice
                yield Done(key, error=describe(error))
