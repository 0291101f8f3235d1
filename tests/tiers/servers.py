"""Redis servers on loopback, started by the tests that need them and stopped with them."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import redis
from processes import end_with_parent, free_port, standing_still, wait_until
from redis.backoff import NoBackoff
from redis.retry import Retry

import system


class RedisServer:
    """A process of redis-server that keeps nothing on disk; it ends with this process.

    `PORT` in an option becomes its port; with `--tls-port PORT` it has no other.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.folder = folder
        self._bus_port = free_port()
        self._options = [each.replace("PORT", str(self.port)) for each in options]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def socket_path(self) -> Path:
        return self.folder / f"{self.port}.sock"

    def client(self, **words) -> redis.Redis:
        """A client of redis-py, by the Unix socket, which needs no TLS."""
        words["retry"] = Retry(NoBackoff(), 0)
        return redis.Redis(unix_socket_path=str(self.socket_path), protocol=2, **words)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *end_with_parent(),
                system.need("redis-server"),
                *("--port", "0" if "--tls-port" in self._options else str(self.port)),
                *("--bind", "127.0.0.1", "--save", ""),
                *("--unixsocket", str(self.socket_path), "--dir", str(self.folder)),
                *("--loglevel", "warning", "--logfile", str(self.folder / f"{self.port}.log")),
                # Its usual bus port, the port + 10,000, may be out of range.
                *("--cluster-port", str(self._bus_port)),
                *self._options,
            ],
        )
        wait_until(self._is_up, f"redis-server on port {self.port}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def meet(self, other: "RedisServer") -> None:
        """Join the cluster of another node."""
        with self.client() as client:
            address = ("127.0.0.1", other.port, other._bus_port)
            client.execute_command("CLUSTER MEET", *address)

    def hanging(self) -> AbstractContextManager[None]:
        return standing_still(self.process)

    @contextmanager
    def gone(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def _is_up(self) -> bool:
        assert self.process.poll() is None, f"redis-server ended: {self.folder}/{self.port}.log"
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.BusyLoadingError):
            return False


@contextmanager
def running(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.stop()


NODE_TIMING = ("--cluster-node-timeout", "2000")
"""A vote that failed is asked for again after four times this (ms)."""


@contextmanager
def running_cluster(folder: Path, num_nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Nodes of a cluster without replicas; the slots are dealt out evenly."""
    nodes = []
    try:
        for number in range(num_nodes):
            options = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{number}.conf")
            full = ("--cluster-require-full-coverage", "no")
            nodes.append(RedisServer(folder, *options, *full, *NODE_TIMING))
        share = -(-(1 << 14) // num_nodes)
        for number, node in enumerate(nodes):
            last = min((number + 1) * share, 1 << 14) - 1
            with node.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            node.meet(nodes[0])
        wait_for_cluster(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def wait_for_cluster(nodes: list[RedisServer]) -> None:
    wait_until(lambda: all(_knows_all(node, len(nodes)) for node in nodes), "the cluster")


def _knows_all(node: RedisServer, num_nodes: int) -> bool:
    with node.client() as client:
        masters = {
            tuple(master[:2]) for _, _, master, *_ in client.execute_command("CLUSTER SLOTS")
        }
        info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and len(masters) == num_nodes


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that signs itself, for 127.0.0.1, and its key."""
    certificate, key = folder / "server.crt", folder / "server.key"
    subprocess.run(
        [
            *(system.need("openssl"), "req", "-x509", "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=quire test", "-keyout", str(key)),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
