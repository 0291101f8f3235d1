"""Object stores keep to the contract of tiers: S3 over HTTP, a local directory, memory."""

import shutil
from contextlib import contextmanager

import obstore
import pytest
from objects_help import objects_of, rewrite, s3_front, s3_tier
from obstore.store import LocalStore
from s3_server import hanging, overloaded
from searching import found_in_bytes

from quire.tiers.contract import TierContract
from quire.tiers.objects import Objects


@pytest.fixture(scope="module")
def front():
    yield from s3_front()


class ObjectsContract(TierContract):
    def search(self, tier, needle):
        where = []
        for path in objects_of(tier):
            where += found_in_bytes("name", path.encode(), needle)
            content = bytes(obstore.get(tier._client.store, path).bytes())
            where += found_in_bytes(path, content, needle)
        return where

    def tamper(self, tier, key, record):
        rewrite(tier, key, record)

    def reopen(self, tier):
        store = tier._client.store
        tier.close()
        return Objects(store)


class TestObjectsInMemory(ObjectsContract):
    @pytest.fixture
    def make_tier(self):
        return lambda: Objects("memory://")


@pytest.mark.ci
class TestDirectory(ObjectsContract):
    @pytest.fixture
    def make_tier(self, tmp_path):
        self.path = tmp_path / "store"
        return lambda: Objects(LocalStore(self.path, mkdir=True))

    @contextmanager
    def broken(self, tier):
        shutil.rmtree(self.path)
        self.path.write_text("no directory")
        yield


class TestS3(ObjectsContract):
    @pytest.fixture
    def make_tier(self, front):
        self.front = front
        return lambda: s3_tier(front.url)

    @contextmanager
    def stalled(self, tier):
        with self.front.failing(hanging):
            yield

    @contextmanager
    def broken(self, tier):
        with self.front.failing(overloaded):
            yield
