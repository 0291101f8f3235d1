"""Places for the replays of a sweep: this process, others, or Ray."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from traceback import format_exception
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from quire.config import check_count
from quire.errors import ConfigError, QuireError
from quire.extras import lacking
from quire_sim.names import unknown

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
    """In `num_workers` new Python processes of this machine (spawned: nothing is inherited).

    No thread of this process takes part, and workers share no lock: whoever ends one can wait for it.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = check_count("the number of workers", num_workers, limit=4096)

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Done[Result]:
        if len(tasks) < 2 or self._num_workers == 1:
            yield from Serial().run(function, tasks)
            return
        workers: dict[Connection, BaseProcess] = {}
        try:
            with _interrupts_wait():
                for _ in range(min(self._num_workers, len(tasks))):
                    workers |= [_begun_worker()]
            for connection in workers:
                _send(connection, function)
            yield from _shared_out(list(enumerate(tasks)), workers)
        finally:
            for connection, worker in workers.items():
                worker.terminate()  # nobody waits for the rest, and not every one knows of an interrupt
                worker.join()
                connection.close()


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


def _begun_worker() -> tuple[Connection, BaseProcess]:
    ours, theirs = get_context("spawn").Pipe()
    worker = get_context("spawn").Process(target=_work, args=(theirs,), daemon=True)
    worker.start()
    theirs.close()  # so that ours ends with the worker
    return ours, worker


def _shared_out(
    tasks: Sequence[tuple[int, Any]], workers: Mapping[Connection, BaseProcess]
) -> Done[Any]:
    """Give every worker a task, and the next one when it is done."""
    left = iter(tasks)
    at_work: dict[Connection, int] = {}

    def give(connection: Connection) -> None:
        for number, task in islice(left, 1):
            at_work[connection] = number
            _send(connection, task)

    for connection in workers:
        give(connection)
    while at_work:
        for connection in cast("list[Connection]", wait([*at_work], WAKE_S)):
            number = at_work.pop(connection)
            try:
                result, error = connection.recv()
            except (EOFError, OSError) as ended:
                raise _why_ended(workers[connection]) from ended
            if error is not None:
                raise error
            give(connection)
            yield number, result


def _send(connection: Connection, sent: object) -> None:
    """Send to a worker; of one that has ended, the next look at it tells."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(sent)


def _why_ended(worker: BaseProcess) -> BaseException:
    worker.join()
    if worker.exitcode == -signal.SIGINT:
        return KeyboardInterrupt()  # it came to a worker first
    return QuireError(
        f"a worker process ended with exit code {worker.exitcode} before its work was done, "
        "as one does that the system ends for want of memory; use fewer --jobs, or one"
    )


def _work(connection: Connection) -> None:
    """Answer every task with its result and None, or None and the error, until the tasks end."""
    # Ctrl-C ends this worker without a word: the process that began it says what happened.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with suppress(EOFError):
        function = connection.recv()
        while True:
            connection.send(_result(function, connection.recv()))


def _result(function: Callable[[Any], Any], task: object) -> tuple[Any, Exception | None]:
    try:
        return function(task), None
    except Exception as error:  # noqa: BLE001 - it is raised where the results are read
        error.add_note("".join(format_exception(error)))  # the traceback is not pickled
        return None, error


@contextmanager
def _interrupts_wait() -> Generator[None]:
    """Hold Ctrl-C back while processes begin: half begun, they would end with a traceback of their own.

    They inherit the mask. It does not hold for this process, where another thread may get the signal.
    """
    comes_here = threading.current_thread() is threading.main_thread()
    is_ignored = (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    )  # as under nohup; workers inherit it
    if is_ignored or not (comes_here and hasattr(signal, "pthread_sigmask")):
        yield
        return
    resource_tracker.ensure_running()  # which begins with the first process, and ends a mask
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


def _call(function: Callable[[Task], Result], task: Task) -> Result:
    return function(task)


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ConfigError(lacking("--executor ray", "ray", "ray")) from error
    return ray
