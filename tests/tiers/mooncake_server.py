"""A Mooncake master on loopback, and a second process that gives the store its memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import system

_MEMORY = """
import sys
from quire.tiers.mooncake import Mooncake
with Mooncake(sys.argv[1], memory=int(sys.argv[2])):
    print("joined", flush=True)
    sys.stdin.read()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class MooncakeServer:
    """A master with `memory` bytes to give, in two processes, which end with this object."""

    def __init__(self, log: Path, memory: int = 512 << 20) -> None:
        self._log = log
        self._memory_bytes = memory
        self._binary = Path(system.need("mooncake")).with_name("mooncake_master")
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._environment = {**os.environ, "GLOG_minloglevel": "2"}
        self._processes: list[subprocess.Popen] = []
        self.start()

    def start(self) -> None:
        command = [
            self._binary,
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port()}",
            "--enable_metric_reporting=false",
            "--default_kv_lease_ttl=1000",
        ]
        with self._log.open("ab") as output:
            self.master = subprocess.Popen(
                command, stdout=output, stderr=output, env=self._environment
            )
            self._processes = [self.master]
            deadline = time.monotonic() + 30
            while not self._answers():
                if self.master.poll() is not None or time.monotonic() > deadline:
                    self._fail("mooncake_master does not start")
                time.sleep(0.02)
            self.memory = subprocess.Popen(
                [sys.executable, "-c", _MEMORY, self.address, str(self._memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=self._environment,
            )
        self._processes.append(self.memory)
        if self.memory.stdout.readline().strip() != b"joined":
            self._fail("the process with the memory cannot join")

    @contextmanager
    def stopped(self, process: subprocess.Popen):
        """The process takes connections and answers nothing."""
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        self._processes = []

    def _fail(self, what: str) -> None:
        self.kill()
        raise RuntimeError(f"{what}: {self._log.read_text()[-2000:]}")

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False
