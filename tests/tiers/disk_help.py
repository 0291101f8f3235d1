"""Files that fail when a test says so, and short ways to put and get."""

import errno
import os
import shutil
import threading

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.disk.files import DiskFiles


class FaultyFiles(DiskFiles):
    """Fails writes to files whose name begins so, with an error number; None: works."""

    def __init__(self):
        self.prefix = "slab"
        self.error = None
        self.full = False
        self.num_reads = 0
        self.names = {}
        self.reading = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def open(self, path, flags):
        descriptor = super().open(path, flags)
        self.names[descriptor] = path.name
        return descriptor

    def fail(self, descriptor):
        if self.error is not None and self.names[descriptor].startswith(self.prefix):
            raise OSError(self.error, os.strerror(self.error))

    def write_at(self, descriptor, data, offset):
        self.fail(descriptor)
        super().write_at(descriptor, data, offset)

    def write_run(self, descriptor, parts, offset):
        for part in parts:
            self.write_at(descriptor, part, offset)
            offset += len(part)

    def allocate(self, descriptor, offset, num_bytes):
        self.fail(descriptor)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(descriptor, offset, num_bytes)

    def read_run(self, descriptor, buffers, offset):
        return sum(
            self.read_at(descriptor, buffer, offset + at * len(buffer))
            for at, buffer in enumerate(buffers)
        )

    def read_at(self, descriptor, buffer, offset):
        self.num_reads += 1
        if threading.current_thread().name == "reader":
            self.reading.set()
            self.go_on.wait(10)
        return super().read_at(descriptor, buffer, offset)


def put(disk, numbers, payload_bytes=1000):
    keys = names_of(numbers)
    return disk.put(keys, records_of(keys, payload_bytes), 60)


def get(disk, numbers, payload_bytes=1000):
    """Return the outcomes, after a check that all hits are right."""
    keys = names_of(numbers)
    records = records_of(keys, payload_bytes)
    buffers = buffers_like(records)
    outcomes = disk.get(keys, buffers, 60)
    for outcome, buffer, record in zip(outcomes, buffers, records, strict=True):
        assert outcome is not Outcome.HIT or buffer == record
    return outcomes


def filled(path, count=20, **options):
    """Return a disk with so many records of 1,152 bytes, without places ahead."""
    disk = Disk(path, "1MiB", ahead=1, **options)
    keys = names_of(range(count))
    assert disk.put(keys, records_of(keys), 10) == [Outcome.STORED] * count
    assert disk.settle(10)
    return disk


def left(path, count=20):
    """Return a directory as a process leaves it that was killed."""
    disk = filled(path / "open", count)
    shutil.copytree(path / "open", path / "left")
    disk.close()
    return path / "left"


def found(path, count=20):
    """Open a directory; return the outcomes of its records, after a check that all hits are right."""
    keys = names_of(range(count))
    records = records_of(keys)
    buffers = buffers_like(records)
    with Disk(path, "1MiB", ahead=1) as disk:
        disk.check()
        outcomes = disk.get(keys, buffers, 10)
        disk.check()
    for outcome, buffer, record in zip(outcomes, buffers, records, strict=True):
        assert outcome is not Outcome.HIT or buffer == record
    return outcomes
