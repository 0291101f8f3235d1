"""The disk tier: the contract on a real directory, and what only a disk does."""

from contextlib import contextmanager

import pytest
from searching import found_in_files

from quire.tiers.contract import BoundedContract
from quire.tiers.disk import Disk


class DiskContract(BoundedContract):
    direct = None

    @pytest.fixture
    def make_tier(self, tmp_path):
        made = []

        def make(capacity=None):
            path = tmp_path / str(len(made))
            made.append(path)
            tier = Disk(path, capacity or "64MiB", direct=self.direct)
            tier.opened = (path, capacity or "64MiB")
            return tier

        return make

    def reopen(self, tier):
        path, capacity = tier.opened
        tier.close()
        return Disk(path, capacity, direct=self.direct)

    def search(self, tier, needle):
        return found_in_files(tier.path, needle)

    def poison(self, tier, key, record):
        """Write as whoever holds the directory and has no tier key: the index says what the record does."""
        trust, tier.trust = tier.trust, None
        tier.delete([key])
        tier.put_sealed([key], [memoryview(record)], 10.0)
        tier.trust = trust

    def tamper(self, tier, key, record):
        tier.settle(10)  # else zeros are written behind the end that is cut here
        place = tier._records.find([key])[0]
        size = place.slab.record_bytes
        path = tier.opened[0] / f"slab-{size}.quire"
        with path.open("r+b") as file:
            file.seek(place.place * size)
            # A place has one length: it holds the end of longer bytes, and the file ends in shorter ones.
            file.write(record[-size:])
            if len(record) < size:
                file.truncate()

    @contextmanager
    def broken(self, tier):
        def fails(*_):
            raise OSError(5, "Input/output error")

        files = tier._files
        methods = ("read_at", "read_run", "write_at", "write_run", "allocate", "truncate")
        for name in methods:
            setattr(files, name, fails)
        yield
        for name in methods:
            delattr(files, name)


class TestDiskDirect(DiskContract):
    """Where the file system takes O_DIRECT; else buffered, as the probe decides."""


@pytest.mark.ci
class TestDiskBuffered(DiskContract):
    direct = False
