"""The contract of tiers against real servers: one, over TLS with a user, over a Unix socket, a cluster."""

import os
from contextlib import ExitStack, contextmanager
from itertools import count

import pytest
from searching import found_in_bytes
from servers import make_certificate, running, running_cluster, wait_for_cluster

from quire.tiers.contract import TierContract
from quire.tiers.redis import Redis

ACL = [
    "+get",
    "+set",
    "+exists",
    "+unlink",
    "+pexpire",
    "+touch",
    "+strlen",
    "+scan",
    "+info",
    "+ping",
    "+select",
    "+cluster|slots",
]
PREFIXES = count()


pytestmark = pytest.mark.system("redis-server")


class RedisContract(TierContract):
    """The base of the contracts below: `servers`, and their `url`."""

    db = 0
    drops_what_it_read = False

    @pytest.fixture
    def make_tier(self, url, servers):
        self._url, self._servers = url, servers
        return lambda: Redis(url, prefix=f"contract-{next(PREFIXES)}:")

    def search(self, tier, needle):
        where = []
        for server in self._servers:
            with server.client(db=self.db) as client:
                for name in client.scan_iter():
                    where += found_in_bytes("name", name, needle)
                    where += found_in_bytes(f"{name}", client.dump(name) or b"", needle)
        return where

    def tamper(self, tier, key, record):
        (name,) = tier._names([key])
        with self.owner_of(tier, name).client(db=self.db) as client:
            client.set(name, record)

    def owner_of(self, tier, name):
        return self._servers[0]

    def reopen(self, tier):
        tier.close()
        return Redis(self._url, prefix=tier._prefix.decode())

    @contextmanager
    def stalled(self, tier):
        with ExitStack() as stack:
            for server in self._servers:
                stack.enter_context(server.hanging())
            yield

    @contextmanager
    def broken(self, tier):
        with ExitStack() as stack:
            for server in self._servers:
                stack.enter_context(server.gone())
            yield


@pytest.fixture(scope="module")
def one_server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("one"), "--maxmemory", "512mb") as server:
        yield server


class TestOneServer(RedisContract):
    db = 3

    @pytest.fixture
    def servers(self, one_server):
        return [one_server]

    @pytest.fixture
    def url(self, one_server):
        return f"{one_server.url}/3"


@pytest.mark.ci
class TestUnixSocket(RedisContract):
    @pytest.fixture
    def servers(self, one_server):
        return [one_server]

    @pytest.fixture
    def url(self, one_server):
        return f"unix://{one_server.socket_path}"


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = map(str, make_certificate(folder))
    with (
        pytest.MonkeyPatch.context() as patch,
        running(
            folder,
            *("--tls-port", "PORT", "--tls-cert-file", certificate, "--tls-key-file", key),
            *("--tls-ca-cert-file", certificate, "--tls-auth-clients", "no"),
            *("--user", "quire", "on", ">open sesame", "~contract-*", *ACL),
        ) as server,
    ):
        patch.setenv("SSL_CERT_FILE", os.devnull)  # what the system trusts takes 30 ms to read
        yield server


@pytest.mark.system("openssl")
class TestUserOverTls(RedisContract):
    @pytest.fixture
    def servers(self, tls_server):
        return [tls_server]

    @pytest.fixture
    def url(self, tls_server):
        where = f"127.0.0.1:{tls_server.port}?ssl_ca_certs={tls_server.folder}/server.crt"
        return f"rediss://quire:open%20sesame@{where}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.mark.ci
class TestCluster(RedisContract):
    @pytest.fixture
    def servers(self, cluster):
        return cluster

    @pytest.fixture
    def url(self, cluster):
        return cluster[0].url.replace("redis://", "redis+cluster://")

    def owner_of(self, tier, name):
        owner = tier._servers.owner_of(name)
        return next(node for node in self._servers if owner.endswith(f":{node.port}"))

    @contextmanager
    def broken(self, tier):
        with super().broken(tier):
            yield
        wait_for_cluster(self._servers)
