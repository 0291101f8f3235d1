"""The tiers of this machine keep to the contract."""

from contextlib import contextmanager

import numpy as np
import pytest
from searching import found_in_files, found_in_memory

from quire.tiers.contract import BoundedContract, TierContract
from quire.tiers.files import Files
from quire.tiers.host import Host


class TestFiles(TierContract):
    @pytest.fixture
    def make_tier(self, tmp_path):
        return lambda capacity=None: Files(tmp_path / "kv", capacity)

    def tamper(self, tier, key, record):
        name = key.hex()
        (tier.path / name[:2] / f"{name}.quire").write_bytes(record)

    def search(self, tier, needle):
        return found_in_files(tier.path, needle)

    @contextmanager
    def broken(self, tier):
        elsewhere = tier.path.rename(tier.path.with_name("elsewhere"))
        tier.path.write_text("no directory")
        yield
        tier.path.unlink()
        elsewhere.rename(tier.path)

    def reopen(self, tier):
        tier.close()
        return Files(tier.path)


class TestFilesWithACapacity(TestFiles, BoundedContract):
    tells_evictions = False

    @pytest.fixture
    def make_tier(self, tmp_path):
        return lambda capacity=None: Files(tmp_path / "kv", capacity or "64MiB")


class TestHost(BoundedContract):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity=None: Host(capacity or "64MiB")

    def search(self, tier, needle):
        return found_in_memory(tier, needle)

    def tamper(self, tier, key, record):
        shelf, place = tier._arena.find(key)
        if len(record) != shelf.size:
            pytest.skip("a place has the size of its record: nothing shorter or longer lies there")
        shelf.view(place)[:] = np.frombuffer(record, np.uint8)
