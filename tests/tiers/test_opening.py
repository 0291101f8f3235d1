"""Tiers from what people write."""

import sys
import tomllib
import traceback
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import quote

import pytest

from quire.engines.tiered.opening import open_stack
from quire.errors import ConfigError, TierBusy, TierError
from quire.tiers.addresses import shown
from quire.tiers.base import Outcome, Tier
from quire.tiers.contract.samples import name_of, record_of
from quire.tiers.disk import Disk
from quire.tiers.files import Files
from quire.tiers.host import Host
from quire.tiers.mooncake.sockets import address_of
from quire.tiers.objects import Objects
from quire.tiers.opening import open_tier, open_tiers
from quire.tiers.redis import Redis
from quire.tiers.redis.url import parse_server
from quire.tiers.stack import TierStack


def works(tier):
    with tier:
        return tier.put([name_of(1)], [record_of(name_of(1))]) == [Outcome.STORED]


def test_a_line_names_a_kind_and_where_it_is(tmp_path):
    lines = {
        "host:8MiB": (Host, 8 << 20),
        f"disk:{tmp_path}/disk?capacity=64MiB": (Disk, 64 << 20),
        f"disk://{tmp_path}/disk2?capacity=64MiB&direct=false": (Disk, 64 << 20),
        f"files:{tmp_path}/files": (Files, -1),
        f"files:{tmp_path}/bounded?capacity=1GB": (Files, 10**9),
        "memory://": (Objects, -1),
    }
    for line, (kind, capacity) in lines.items():
        tier = open_tier(line)
        assert type(tier) is kind, line
        assert tier.stats().capacity_bytes == capacity
        assert works(tier), line


def test_a_table_says_the_same_with_names(tmp_path):
    text = f"""
        [[tiers]]
        kind = "host"
        capacity = 8_388_608
        name = "fast"
        [[tiers]]
        kind = "disk"
        path = "{tmp_path}/disk"
        capacity = "64MiB"
        direct = false
        [[tiers]]
        kind = "objects"
        url = "memory://"
    """
    tiers = open_tiers(tomllib.loads(text)["tiers"])
    assert [type(tier) for tier in tiers] == [Host, Disk, Objects]
    assert tiers[0].name == "fast"
    assert all(works(tier) for tier in tiers)


def test_a_path_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_tier("files:~/kv") as tier:
        assert tier.path == tmp_path / "kv"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "names no tier: write kind:where"),
        ("8GiB", "names no tier: write kind:where"),
        (":8GiB", "names no tier: write kind:where"),
        ("hots:8GiB", "no tier is called 'hots', did you mean 'host'"),
        ("redsi://localhost", "did you mean 'redis'"),
        ("ssd:/x", "kinds: disk, files, host, .*objects, redis"),
        ("host:", "host needs capacity, for example 'host:8GiB'"),
        ("host:8 lightyears", "'lightyears' in '8 lightyears' is not a unit"),
        ("host:8GiB?capacity=9GiB", "capacity is given twice"),
        ("disk:/x?capacity=1GiB&capacity=2GiB", "an option is given twice"),
        ("disk:/x", "disk needs capacity, for example 'disk:/var/kv.capacity=200GiB'"),
        ("disk:?capacity=1GiB", "disk needs path"),
        ("disk:/x?capacity", "behind the question mark stand options, name=value"),
        ("disk:/x?capacitee=1GiB", "no option 'capacitee', did you mean 'capacity'"),
        ("disk:/x?capacity=1GiB&direct=perhaps", "disk: direct cannot be 'perhaps'"),
        ("files:/proc/x?capacity=-3", "-3"),
        ("file:///x", "no tier is called 'file', did you mean 'files'"),
        ("s3:bucket", "write s3://..."),
        ("redis://localhost?connections=0", "connections must be from 1 to 1024, got 0"),
        ("redis://localhost?conections=1", "no option 'conections', did you mean 'connections'"),
        ("redis://localhost?ssl_cert_reqs=none", "unknown option 'ssl_cert_reqs' in a redis"),
        ("redis://localhost/word", "database number"),
        ("memory://?concurrency=0", "concurrency must be from 1"),
        ("s3://bucket/x?reggion=y", "reggion"),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_what_to_write(line, message):
    with pytest.raises(ConfigError, match=message.replace("?", ".")):
        open_tier(line)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "needs kind, one of disk, files, host"),
        ({"capacity": "1GiB"}, "it has capacity"),
        ({"kind": 7}, "needs kind"),
        ({"kind": "host"}, "host needs capacity"),
        ({"kind": "host", "capacity": 1.5}, "capacity cannot be 1.5"),
        ({"kind": "host", "capacity": True}, "True"),
        ({"kind": "host", "capacity": "1MiB", "name": 3}, "the name of a tier is text, not 3"),
        ({"kind": "hst", "capacity": "1MiB"}, "did you mean 'host'"),
        ({"kind": "rediss", "url": "rediss://h"}, "write kind = 'redis' and url = 'rediss://...'"),
        ({"kind": "s3", "url": "s3://bucket"}, "write kind = 'objects' and url = 's3://...'"),
        ({"kind": "objects", "url": "memory://", "concurrency": "many"}, "concurrency cannot be"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_what_to_write(table, message):
    with pytest.raises(ConfigError, match=message):
        open_tier(table)


SPECIAL = [
    f"{before}{each}{after}"
    for each in "/#@%?:&=[ "
    for before, after in [
        ("hunter2", "hunter2"),
        ("", "hunter2"),
        ("hunter2", ""),
        ("1", "hunter2"),
        ("x=1&", "hunter2"),
    ]
]
LINES = [
    "redis://user:{}@127.0.0.1:1",
    "redis://:{}@127.0.0.1:1/0",
    "redis://{}@127.0.0.1:1",
    "rediss://{}:{}@127.0.0.1:1",
    "redis+cluster://:{}@127.0.0.1:1",
    "unix://u:{}@/x.sock",
    "redis://user:{}@127.0.0.1:1?wrong=hunter2",
    "redsi://user:{}@127.0.0.1:1?x",
    "redis:{}@127.0.0.1",
    "user:{}@127.0.0.1:1",
    ":{}@127.0.0.1:1",
    "az://user:{}@container",
    "file://user:{}@host/x",
    "s3:?secret_access_key={}",
    "s3://b?secret_access_key={}&allow_http={}",
    "s3://b?nonsense={}",
]


@pytest.mark.cases(5)
@pytest.mark.parametrize("line", LINES)
def test_no_error_shows_a_password_whatever_is_in_it(line):
    for password in ("hunter2", *SPECIAL):
        given = line.replace("{}", password)
        try:
            tier = open_tier(given)
        except (ConfigError, TierError) as error:
            said = "".join(traceback.format_exception(error))
        else:
            with tier:
                tier.contains([name_of(1)], timeout_s=0.01)
                said = f"{tier!r} {tier.stats()}"
        assert "hunter2" not in said, given


HIDDEN = "hunter2secret"
ADDRESS = f"redis://:{HIDDEN}@h"
KEY = f"-----BEGIN PRIVATE KEY-----\n{HIDDEN}"
LONG_KEY = KEY * 100


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "redis", "url": [ADDRESS]}, "url cannot be a value of type list: Expected `str`"),
        ({"kind": "objects", "url": {"a": HIDDEN}}, "type dict"),
        ({"kind": "objects", "url": "s3://b", "config": HIDDEN}, "config cannot be a value"),
        ({"kind": "objects", "url": "s3://b", "config": [HIDDEN]}, "type list"),
        ({"kind": "objects", "url": "s3://b", "config": {"token": [HIDDEN]}}, "type dict"),
        ({"kind": "objects", "url": "s3://b", "client_options": HIDDEN}, "type str"),
        ({"kind": "objects", "url": "s3://b", "concurrency": ADDRESS}, "concurrency cannot be"),
        ({"kind": "redis", "url": "redis://h", "ttl_s": ADDRESS}, "ttl_s cannot be a value"),
        ({"kind": "rediss", "url": ADDRESS}, "rediss"),
        ({"kind": ADDRESS}, "no tier is called"),
        ({"kind": "host", "capacity": ADDRESS}, "give a size"),
        ({"kind": "host", "capacity": [ADDRESS]}, "capacity cannot be"),
        ({"kind": "host", "capacity": "1MiB", "name": [ADDRESS]}, "name of a tier is text"),
        ({"kind": "redis", "url": "rediss://h", "ssl_keyfile": KEY}, "no file"),
        ({"kind": "redis", "url": "rediss://h", "ssl_keyfile": LONG_KEY}, "no file"),
        ({"kind": "redis", "url": "rediss://h", "ssl_cert_reqs": ADDRESS}, "'required' or 'none'"),
    ],
)
def test_a_wrong_value_that_may_hold_a_password_is_shown_by_its_type(table, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_tier(table)
    assert HIDDEN not in "".join(traceback.format_exception(caught.value))


def test_an_address_in_the_place_of_something_else_is_not_shown():
    for call in (
        lambda: open_stack(ADDRESS, None),
        lambda: open_stack([], {"write": ADDRESS}),
        lambda: Host(ADDRESS),
        lambda: address_of(ADDRESS),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert ADDRESS not in str(caught.value)
        assert HIDDEN not in str(caught.value)


@pytest.mark.parametrize("password", ["a/b", "a#b", "a@b", "a%b", "a?b", "a:b", " &=+"])
def test_a_percent_encoded_password_is_what_the_server_is_given(password):
    words, _ = parse_server(f"redis://user:{quote(password, safe='')}@host:1/2")
    assert (words["username"], words["password"]) == ("user", password)


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("redis://user:a/b#c@d@host:1/2?x=y", "redis://...@host:1/2"),
        ("redis://user:a?b@host:1", "redis://..."),
        ("s3://bucket/x?secret=y", "s3://bucket/x"),
        ("host:8GiB", "host:8GiB"),
        ("disk:/var/kv?capacity=1GiB", "disk:/var/kv"),
    ],
)
def test_an_address_is_shown_without_what_is_secret(line, seen):
    assert shown(line) == seen


def test_options_of_an_object_store_are_its_configuration():
    with open_tier("s3://bucket/prefix?region=eu-central-1&endpoint=http://127.0.0.1:1") as tier:
        key, record = name_of(1), record_of(name_of(1))
        assert tier.put([key], [record], timeout_s=0.3)[0] in (Outcome.ERROR, Outcome.TIMEOUT)


def test_where_one_of_several_cannot_be_opened_the_others_are_closed(tmp_path):
    line = f"disk:{tmp_path}/kv?capacity=64MiB"
    with pytest.raises(ConfigError, match="did you mean 'host'"):
        open_tiers([line, "hots:1GiB"])
    (tier,) = open_tiers([line])
    with pytest.raises(TierBusy):
        open_tier(line)
    with tier:
        assert open_tiers([tier]) == [tier]


MODULE = """
from quire.tiers.host import Host

class Cellar(Host):
    def __init__(self, where, *, depth: int = 1):
        super().__init__("1MiB")
        self.where, self.depth = where, depth

def attic(where):
    return "no tier"
"""


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """Install a package that offers tiers, for this test."""
    (tmp_path / "cellar_tiers.py").write_text(MODULE)
    info = tmp_path / "cellar_tiers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cellar-tiers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[quire.tiers]\ncellar = cellar_tiers:Cellar\nattic = cellar_tiers:attic\n"
        "gone = cellar_tiers:Gone\nhost = cellar_tiers:Cellar\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("offered")
def test_a_package_offers_a_kind_by_an_entry_point():
    for spec in (
        "cellar:/below?depth=3&name=mine",
        "cellar:///below?depth=3&name=mine",
        {"kind": "cellar", "where": "/below", "depth": "3", "name": "mine"},
    ):
        with open_tier(spec) as tier:
            assert isinstance(tier, Tier)
            assert (type(tier).__name__, tier.where, tier.depth) == ("Cellar", "/below", 3)
            assert tier.name == "mine"


@pytest.mark.usefixtures("offered")
def test_an_entry_point_that_gives_no_tier_is_refused_and_none_replaces_a_shipped_kind():
    with pytest.raises(ConfigError, match=r"'attic' of 'quire.tiers' gave str"):
        open_tier("attic:x")
    with pytest.raises(ConfigError, match=r"'gone' \(cellar_tiers:Gone\) cannot be loaded"):
        open_tier("gone:x")
    with pytest.raises(ConfigError, match="cellar: depth cannot be 'deep'"):
        open_tier("cellar:x?depth=deep")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'width'"):
        open_tier("cellar:x?width=3")
    with pytest.raises(ConfigError, match="kinds: attic, cellar, disk, files, gone, host"):
        open_tier("zzz:x")
    with open_tier("host:1MiB") as tier:
        assert type(tier) is Host


def test_mooncake_is_a_kind_by_the_entry_point_of_the_package_itself(tmp_path, monkeypatch):
    pytest.importorskip("mooncake")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    offers = project["project"]["entry-points"]["quire.tiers"]
    info = tmp_path / "quire_offers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-offers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[quire.tiers]\n" + "".join(f"{name} = {value}\n" for name, value in offers.items())
    )
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(
        "quire.plugins.entry_points",
        lambda group, **name: distribution("quire-offers").entry_points.select(group=group, **name),
    )
    with pytest.raises(ConfigError, match="callers must be from 1"):
        open_tier("mooncake:127.0.0.1:1?callers=0")


@pytest.mark.parametrize("spec", [None, 3, ["host:1MiB"], b"host:1MiB", ("kind", "host")])
def test_a_tier_that_is_neither_a_line_nor_a_table_is_refused(spec):
    with pytest.raises(
        ConfigError, match="a tier is named by a line, as 'host:8GiB', or by a table"
    ):
        open_tier(spec)


@pytest.mark.parametrize("path", ["", None, 7, b"kv", ["kv"], "k\0v"])
@pytest.mark.parametrize("kind", [lambda path: Disk(path, "1MiB"), Files])
def test_a_directory_is_a_path_that_says_where(kind, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a tier's directory is a path"):
        kind(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "table", [{"kind": "disk", "path": "", "capacity": "1MiB"}, {"kind": "files", "path": ""}]
)
def test_a_table_with_an_empty_path_has_none(table):
    with pytest.raises(ConfigError, match="needs path"):
        open_tier(table)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        (None, {}, "opened by one URL, as 'redis://localhost:6379', got NoneType"),
        (["redis://localhost"], {}, "opened by one URL, as 'redis://localhost:6379', got list"),
        (
            "redis://localhost",
            {"ttl_s": "60"},
            "ttl_s is from 0.001 to 1e9 seconds or None, not '60'",
        ),
        (
            "redis://localhost",
            {"ttl_s": True},
            "ttl_s is from 0.001 to 1e9 seconds or None, not True",
        ),
        ("redis://localhost", {"connections": "8"}, "connections must be an integer, got '8'"),
        ("redis://localhost", {"prefix": b"x"}, "prefix is text that keys begin with"),
    ],
)
def test_arguments_of_redis_of_another_type_are_refused(url, options, message):
    with pytest.raises(ConfigError, match=message):
        Redis(url, **options)


@pytest.mark.parametrize("tiers", [None, "host:1MiB", {"kind": "host"}, ["host:1MiB"]])
def test_a_stack_is_made_of_open_tiers(tiers):
    with pytest.raises(ConfigError, match="a TierStack is made of open tiers"):
        TierStack(tiers)


@pytest.mark.parametrize("url", [None, ["s3://bucket"], 7])
def test_a_bucket_is_named_by_a_url(url):
    with pytest.raises(ConfigError, match="a bucket is named by a URL"):
        Objects(url)


@pytest.mark.parametrize("master", [None, ["host:1"], 7])
def test_a_master_is_named_by_text(master):
    with pytest.raises(ConfigError, match="give host:port"):
        address_of(master)
