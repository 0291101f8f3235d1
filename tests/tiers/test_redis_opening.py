"""Opening a Redis tier: what is refused, and with which reason."""

import sys
import traceback

import pytest
from processes import wait_until
from redis_help import get
from servers import make_certificate, running

from quire.errors import ConfigError, TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, names_of, record_of
from quire.tiers.redis import Redis

HIT, STORED, ERROR = Outcome.HIT, Outcome.STORED, Outcome.ERROR


needs_redis = pytest.mark.system("redis-server")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@needs_redis
def test_a_replica_is_read_and_takes_nothing(server, tmp_path):
    key, other = names_of(range(2))
    with server.client() as client:
        client.config_set("repl-diskless-sync-delay", 0)
    with (
        running(tmp_path, "--replicaof", f"127.0.0.1 {server.port}") as replica,
        Redis(server.url, prefix="replica:") as tier,
        Redis(replica.url, prefix="replica:") as far,
    ):
        tier.put([key], [record_of(key)])
        wait_until(lambda: far.contains([key])[0], "the replica")
        assert get(far, [key]) == [HIT]
        assert far.put([other], [record_of(other)]) == [ERROR]
        assert far.last_failure.startswith("READONLY")


@needs_redis
def test_a_login_that_fails_is_refused_at_opening_with_the_servers_reason(tmp_path):
    user = "--user quire on >right ~quire:* +get +exists +unlink"
    with running(tmp_path, "--requirepass", "secret", *user.split()) as server:
        at = f"127.0.0.1:{server.port}"
        for url, reason in {
            f"redis://{at}": "Authentication required",
            f"redis://:wrong@{at}": "invalid username-password pair",
            f"redis://quire:wrong@{at}": "invalid username-password pair",
            f"redis://:secret@{at}/99": "DB index is out of range",
        }.items():
            with pytest.raises(TierError, match=reason) as caught:
                Redis(url)
            assert "secret" not in str(caught.value)
            assert "wrong" not in str(caught.value)
        with Redis(f"redis://:secret@{at}") as tier:
            assert tier.put([name_of(1)], [record_of(name_of(1))]) == [STORED]
        with Redis(f"redis://quire:right@{at}") as tier:
            assert get(tier, [name_of(1)]) == [HIT]
            assert tier.put([name_of(2)], [record_of(name_of(2))]) == [ERROR]
            assert tier.last_failure.startswith("NOPERM")
            with pytest.raises(TierError, match="no permissions"):
                list(tier.scan())
        with pytest.raises(TierError, match="NOPERM"):
            Redis(f"redis://quire:right@{at}", prefix="other:")


@needs_redis
def test_a_server_that_repeats_the_password_is_quoted_without_it(tmp_path):
    word = "hunter2"
    with running(tmp_path, "--rename-command", "AUTH", "LOGIN") as server:
        with pytest.raises(TierError, match=r"unknown command 'AUTH'.*\.\.\.") as caught:
            Redis(f"redis://:{word}@127.0.0.1:{server.port}")
        assert word not in "".join(traceback.format_exception(caught.value))


@needs_redis
def test_a_server_that_is_not_there_is_refused_at_opening(server, tmp_path):
    with (
        server.gone(),
        pytest.raises(TierError, match=f"127.0.0.1:{server.port} cannot be reached: .*refused"),
    ):
        Redis(server.url)
    with pytest.raises(TierError, match=r"nobody\.sock cannot be reached"):
        Redis(f"unix://{tmp_path}/nobody.sock")


@pytest.mark.system("redis-server", "openssl")
def test_a_certificate_that_nobody_trusts_is_refused_at_opening(tmp_path):
    certificate, key = map(str, make_certificate(tmp_path))
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no")
    with running(tmp_path, "--tls-port", "PORT", *files) as server:
        url = server.url.replace("redis://", "rediss://")
        with pytest.raises(TierError, match="CERTIFICATE_VERIFY_FAILED"):
            Redis(url)
        with pytest.raises(TierError, match=r"cannot be reached"):
            Redis(server.url)
        other_name = url.replace("127.0.0.1", "localhost") + f"?ssl_ca_certs={certificate}"
        with pytest.raises(TierError, match="CERTIFICATE_VERIFY_FAILED"):
            Redis(other_name)
        Redis(f"{other_name}&ssl_check_hostname=no").close()
        with Redis(f"{url}?ssl_cert_reqs=none") as tier:
            assert tier.put([name_of(1)], [record_of(name_of(1))]) == [STORED]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1", "begins with one of redis, rediss"),
        ("127.0.0.1:6379", "begins with one of"),
        ("redis://127.0.0.1:port", "cannot be read"),
        ("redis://127.0.0.1:99999", "cannot be read"),
        ("redis://127.0.0.1/zero", "is a database number: write redis:"),
        ("redis://127.0.0.1?db=-1", "database -1"),
        ("redis+cluster://127.0.0.1/1", "database 1: it is 0 in a cluster"),
        ("redis://name@127.0.0.1", "a user without a password"),
        ("redis://127.0.0.1?socket_timeout=3", "unknown option 'socket_timeout'"),
        ("redis://127.0.0.1?password=x", "unknown option 'password'"),
        ("redis://127.0.0.1?username=x&password=y", "unknown option 'username'"),
        ("redis://127.0.0.1?host=elsewhere", "unknown option 'host'"),
        ("redis://:x@127.0.0.1:0", "port 0 of a Redis URL"),
        ("redis://127.0.0.1?ssl_ca_certs=x", "unknown option 'ssl_ca_certs'"),
        ("rediss://127.0.0.1?ssl_ca_certs=/nowhere", "certificates that cannot be read"),
        ("rediss://127.0.0.1?ssl_cert_reqs=perhaps", "'required' or 'none', not 'perhaps'"),
        ("unix://", "names a socket"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_password(url, reason):
    with pytest.raises(ConfigError, match=reason):
        Redis(url)


def test_without_redis_py_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[redis\]' in a clone"):
        Redis("redis://127.0.0.1")


@pytest.mark.parametrize(
    "words", [{"ttl_s": 0}, {"ttl_s": -1.0}, {"ttl_s": float("nan")}, {"connections": 0}]
)
def test_settings_that_cannot_work_are_refused(words):
    with pytest.raises(ConfigError, match=r"ttl_s is from|connections must be from"):
        Redis("redis://127.0.0.1:1", **words)


LIMITED = ("--maxmemory", "64mb", "--maxmemory-policy")


@needs_redis
@pytest.mark.parametrize(
    ("options", "words", "said"),
    [
        ((*LIMITED, "allkeys-lru"), {}, ""),
        ((*LIMITED, "volatile-ttl"), {"ttl_s": 60}, ""),
        ((*LIMITED, "allkeys-lfu"), {}, "heads of prompts before their tails (allkeys-lfu)"),
        ((*LIMITED, "volatile-random"), {"ttl_s": 60}, "before their tails (volatile-random)"),
        ((*LIMITED, "volatile-lru"), {}, "records have no ttl_s: it will be full"),
        ((*LIMITED, "noeviction"), {}, "evicts nothing (noeviction): it will be full"),
        ((), {}, "has no maxmemory, and records have no ttl_s: it grows"),
        ((), {"ttl_s": 60}, ""),
    ],
)
def test_a_server_whose_memory_serves_prompts_badly_is_said_once(
    tmp_path, caplog, options, words, said
):
    with running(tmp_path, *options) as server, Redis(server.url, **words) as tier:
        tier.put([name_of(1)], [record_of(name_of(1))])
        lines = [each for each in caplog.records if each.name.startswith("quire.tiers.redis")]
        assert [each.levelname for each in lines] == ["WARNING"] * bool(said)
        assert all(said in each.getMessage() for each in lines)
        assert all(f"127.0.0.1:{server.port} " in each.getMessage() for each in lines)
