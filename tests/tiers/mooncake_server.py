"""A Mooncake master on loopback, and a second process that gives the store its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import end_with_parent, free_port, wait_for_port

import system

_MEMORY = """
import sys
from quire.tiers.mooncake import Mooncake
with Mooncake(sys.argv[1], memory=int(sys.argv[2])):
    print("joined", flush=True)
    sys.stdin.read()
"""


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
            *end_with_parent(),
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
            wait_for_port(self.master, self.port, str(self._log))
            self.memory = subprocess.Popen(
                [sys.executable, "-c", _MEMORY, self.address, str(self._memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=self._environment,
            )
        self._processes.append(self.memory)
        assert self.memory.stdout.readline().strip() == b"joined", f"no memory: {self._log}"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        self._processes = []
