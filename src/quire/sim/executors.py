"""Places for the replays of a sweep: this process, others, or Ray."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeAlias, TypeVar

from quire.config import check_count
from quire.errors import ConfigError
from quire.extras import lacking
from quire.sim.names import unknown

Task = TypeVar("Task")
Result = TypeVar("Result")

Done: TypeAlias = Iterator[tuple[int, Result]]
"""Numbers of tasks with their results, as they are done, in any order."""

RAY_STORE_BYTES = 80 << 20
"""Memory of the object store of a local Ray: results are small. Ray accepts no less than 75 MiB."""


WAKE_S = 1.0
"""A signal that comes just as a thread goes to sleep does not wake it: whoever waits looks so often."""


class Executor(Protocol):
    """Runs a function over tasks, which are pickled where they go to another process."""

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Done[Result]:
        """Yield every task's number and result."""
        ...


class Serial:
    """One after the other, in this process."""

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Done[Result]:
        for number, task in enumerate(tasks):
            yield number, function(task)


class Processes:
    """In `num_workers` new Python processes of this machine (spawned: nothing is inherited)."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = check_count("the number of workers", num_workers, limit=4096)

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Done[Result]:
        if len(tasks) < 2 or self._num_workers == 1:
            yield from Serial().run(function, tasks)
            return
        workers = min(self._num_workers, len(tasks))
        spawned, others = get_context("spawn"), active_children()
        with ProcessPoolExecutor(workers, spawned, initializer=_end_at_interrupt) as pool:
            begun: list[BaseProcess] = []
            is_done = False
            try:
                with _interrupts_wait():
                    futures = {pool.submit(function, task): n for n, task in enumerate(tasks)}
                    begun = [each for each in active_children() if each not in others]
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, WAKE_S, FIRST_COMPLETED)
                    for future in done:
                        yield futures[future], future.result()
                is_done = True
            except BrokenProcessPool as error:
                if any(each.exitcode == -signal.SIGINT for each in begun):
                    raise KeyboardInterrupt from error  # it came to a worker first
                raise
            finally:
                if (
                    not is_done
                ):  # nobody waits for the rest, and not every worker knows of an interrupt
                    for each in begun:
                        each.terminate()
                pool.shutdown(wait=True, cancel_futures=True)


class RayWorkers:
    """On Ray: on the one that runs or that RAY_ADDRESS names, else `num_workers` started here.

    The nodes of a cluster need quire, and the file of the trace under the same path.
    A Ray that was started here is shut down at the end. Raises `ConfigError` without ray.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = check_count("the number of workers", num_workers, limit=4096)

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Done[Result]:
        ray = _ray()
        started = not ray.is_initialized()
        if started:
            ray.init(**self._start_options())
        try:
            remote = ray.remote(max_retries=1)(_call)
            shared = ray.put(function)
            numbers = {remote.remote(shared, task): n for n, task in enumerate(tasks)}
            waiting = list(numbers)
            while waiting:
                (done,), waiting = ray.wait(waiting, num_returns=1)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                yield numbers[done], result
        finally:
            if started:
                ray.shutdown()

    def _start_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if not os.environ.get("RAY_ADDRESS"):
            options |= {
                "num_cpus": self._num_workers,
                "object_store_memory": RAY_STORE_BYTES,
                "include_dashboard": False,
            }
        return options


def executor_named(name: str, num_workers: int) -> Executor:
    """Return an executor of `EXECUTORS` by its name; raise `ConfigError` for another name."""
    if name not in EXECUTORS:
        raise unknown("executor", name, EXECUTORS)
    return EXECUTORS[name](num_workers)


EXECUTORS: dict[str, Callable[[int], Executor]] = {"process": Processes, "ray": RayWorkers}


@contextmanager
def _interrupts_wait() -> Generator[None]:
    """Hold Ctrl-C back while processes begin: half begun, they would end with a traceback of their own.

    They inherit the mask. It does not hold for this process, where another thread may get the signal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _end_at_interrupt() -> None:
    """Let Ctrl-C end this worker without a word: the process that began it says what happened."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _call(function: Callable[[Task], Result], task: Task) -> Result:
    return function(task)


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ConfigError(lacking("--executor ray", "ray", "ray")) from error
    return ray
