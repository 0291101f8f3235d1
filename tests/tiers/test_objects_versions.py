"""A purge of a bucket that keeps old versions: all versions and delete markers of the tenant go, and others' stay."""

import os

import pytest
from objects_help import s3_front, s3_server
from s3_server import CONFIG, FrontHandler

from quire.core import Scope
from quire.exchange.hashing import tenant_tag
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import names_of, records_of
from quire.tiers.objects import Objects
from quire.tiers.objects import versions as versions_module

MINE, OTHER = tenant_tag(Scope(tenant="acme")), tenant_tag(Scope(tenant="bolt"))

boto3 = pytest.importorskip("boto3")


@pytest.fixture(scope="module")
def front():
    yield from s3_front()


@pytest.fixture
def bucket(front):
    """A new bucket with versioning: a client of it, its name, and what opens a tier in it."""
    client = boto3.client(
        "s3",
        endpoint_url=s3_server().url,
        region_name=CONFIG["region"],
        aws_access_key_id=CONFIG["access_key_id"],
        aws_secret_access_key=CONFIG["secret_access_key"],
    )
    name = f"kept-{os.urandom(6).hex()}"
    client.create_bucket(Bucket=name)
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    config = {**CONFIG, "endpoint": front.url}
    return client, name, lambda: Objects(f"s3://{name}/kv", config=config)


def listed(bucket):
    """Names of all versions and delete markers, one for each."""
    client, name, _ = bucket
    page = client.list_object_versions(Bucket=name)
    assert not page["IsTruncated"]
    return [each["Key"] for each in (*page.get("Versions", ()), *page.get("DeleteMarkers", ()))]


def put(tier, tag, numbers):
    keys = names_of(numbers, tag)
    assert tier.put(keys, records_of(keys, 1000), timeout_s=20) == [Outcome.STORED] * len(keys)
    return keys


def write(bucket):
    """Put records of two tenants, delete and put some again, so that both have old versions and markers."""
    with bucket[2]() as tier:
        for tag in (MINE, OTHER):
            keys = put(tier, tag, range(6))
            tier.delete(keys[:3], 20)
            put(tier, tag, range(3))
            gone = put(tier, tag, range(10, 14))
            tier.delete(gone, 20)


def of_tenant(names, tag):
    return [name for name in names if tag.hex() in name]


def test_a_purge_removes_all_versions_and_markers_of_one_tenant(bucket):
    write(bucket)
    before = listed(bucket)
    client, name, open_tier = bucket
    markers = client.list_object_versions(Bucket=name)["DeleteMarkers"]
    assert of_tenant([each["Key"] for each in markers], MINE)
    others = of_tenant(before, OTHER)
    assert len(of_tenant(before, MINE)) == len(others) > 3
    with open_tier() as tier:
        told = tier.purge(MINE, 60)
        assert (told.is_complete, told.reason) == (True, "")
        assert told.count == 6
        assert not of_tenant(listed(bucket), MINE)
        assert of_tenant(listed(bucket), OTHER) == others
        keys = names_of(range(6), OTHER)
        assert list(tier.contains(keys)) == [True] * 6
        assert list(tier.contains(names_of(range(6), MINE))) == [False] * 6
        assert tier.purge(OTHER, 60).is_complete
    assert not of_tenant(listed(bucket), OTHER)


def denied(handler, *_):
    handler.answer(403, [], b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")


def asks_for_versions(handler: FrontHandler):
    return handler.command == "GET" and "versions" in handler.path


def asks_for_versioning(handler: FrontHandler):
    return handler.command == "GET" and "versioning" in handler.path


@pytest.mark.parametrize("concerns", [asks_for_versions, asks_for_versioning])
def test_versions_that_cannot_be_listed_make_a_purge_incomplete(bucket, front, concerns):
    write(bucket)
    with bucket[2]() as tier:
        with front.failing(denied, concerns):
            told = tier.purge(MINE, 60)
        assert not told.is_complete
        assert "old versions of objects are not deleted" in told.reason
        assert "AccessDenied" in told.reason
        assert list(tier.contains(names_of(range(6), MINE))) == [False] * 6
        assert of_tenant(listed(bucket), MINE), "old versions stay, as it says"
        assert tier.purge(MINE, 60).is_complete
    assert not of_tenant(listed(bucket), MINE)


def test_without_boto3_a_purge_says_that_it_cannot_know(bucket, monkeypatch):
    write(bucket)

    def lacking(name):
        raise ImportError(name)

    monkeypatch.setattr(versions_module, "import_module", lacking)
    with bucket[2]() as tier:
        told = tier.purge(MINE, 60)
    assert not told.is_complete
    assert "quire[versions]" in told.reason or "versions" in told.reason
    assert of_tenant(listed(bucket), MINE)
