"""Servers of tests: processes on loopback, which end with the tests, and what is asked of them."""

import os
import shutil
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def end_with_parent() -> list[str]:
    """Words to put before a command so that it ends with the tests, however they end."""
    path = shutil.which("setpriv")
    return [path, "--pdeathsig", "KILL"] if path else []


SOON_S = 10.0
"""What a call with a timeout of less than a second takes at most, on a busy machine too; faults of tests last longer."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)


def wait_for_port(process: subprocess.Popen, port: int, log: str) -> None:
    """Wait until a process takes connections."""

    def answers() -> bool:
        assert process.poll() is None, f"the server ended: {log}"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    wait_until(answers, f"the server on port {port}, {log}", 60.0)


@contextmanager
def standing_still(process: subprocess.Popen) -> Iterator[None]:
    """While entered, connections are accepted by the kernel, and nothing is answered."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # until then its threads may answer still
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def forked(call):
    """Call something in a forked process; return its exit status, or None where it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    for _ in range(6000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None
