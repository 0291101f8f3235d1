"""Servers for the benchmarks, on loopback, gone with their `with` block."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

from quire.errors import TierError

START_S = 20.0


def free_port() -> int:
    """Return a TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def redis_server() -> Generator[int]:
    """Run redis-server without persistence; yield its port. Raises `TierError` where it is not installed."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise TierError("no redis-server on PATH; Debian's package redis-server has one")
    port = free_port()
    options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", str(port), "--dir", folder, *options]
        with _running(command, port):
            yield port


@contextmanager
def s3_server() -> Generator[str]:
    """Run moto's S3 server with a bucket `quire`; yield its URL. Raises `TierError` where it is not installed."""
    if find_spec("moto") is None:
        raise TierError("moto is not installed: pip install 'moto[server]'")
    port = free_port()
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with _running(command, port, keys):
        connection = HTTPConnection("127.0.0.1", port, timeout=START_S)
        connection.request("PUT", "/quire")
        connection.getresponse().read()
        connection.close()
        yield f"http://127.0.0.1:{port}"


@contextmanager
def mooncake_server(num_bytes: int) -> Generator[str]:
    """Run Mooncake's master and a process that gives it memory; yield its address. Raises `TierError`."""
    package = find_spec("mooncake")
    if package is None or package.origin is None:
        raise TierError("Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = [str(Path(package.origin).with_name("mooncake_master")), "--rpc_address=127.0.0.1"]
    command += [f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
    command += ["--enable_metric_reporting=false"]
    with (
        _running(command, port),
        subprocess.Popen(
            [sys.executable, "-c", _GIVE_MEMORY, address, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as giver,
    ):
        try:
            if giver.stdout is None or not giver.stdout.readline():
                raise TierError(f"Mooncake got no memory: {_last_line(giver)}")
            yield address
        finally:
            giver.kill()


_GIVE_MEMORY = """
import sys
from quire.tiers.mooncake import Mooncake
with Mooncake(sys.argv[1], memory=int(sys.argv[2])):
    print("given", flush=True)
    sys.stdin.read()
"""


def _last_line(process: subprocess.Popen[bytes]) -> str:
    process.kill()
    _, said = process.communicate()
    return said.decode(errors="replace").strip().rpartition("\n")[2] or "no reason given"


@contextmanager
def _running(
    command: list[str], port: int, environment: dict[str, str] | None = None
) -> Generator[None]:
    """Run a command until the block ends; begin when its port answers."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | (environment or {}),
    )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TierError(f"{Path(command[0]).name} did not start on port {port}")
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        if process.poll() is None:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
