"""A loss of power at any moment, on files that keep what was synced, and of the rest what chance decides."""

import random
import shutil

import pytest

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, names_of, record_of
from quire.tiers.disk import Disk
from quire.tiers.disk.files import DiskFiles
from quire.tiers.format import new_buffer

SECTOR = 512
CAPACITY = 120_000


class LossyFiles(DiskFiles):
    """Files that note every change, as (path, kind, ...), and what a sync made last.

    `changes`  a list of what was done to names and contents, in order
    `kept`     the changes that were synced, by index
    """

    def __init__(self):
        self.changes = []
        self.kept = set()
        self.paths = {}

    def note(self, *change):
        self.changes.append(change)

    def open(self, path, flags):
        is_new = not path.exists()
        descriptor = super().open(path, flags)
        self.paths[descriptor] = path.name
        if is_new:
            self.note(path.name, "create")
        return descriptor

    def write_at(self, descriptor, data, offset):
        super().write_at(descriptor, data, offset)
        self.note(self.paths[descriptor], "write", offset, bytes(data))

    def write_run(self, descriptor, parts, offset):
        for part in parts:
            self.write_at(descriptor, part, offset)
            offset += len(part)

    def allocate(self, descriptor, offset, num_bytes):
        super().allocate(descriptor, offset, num_bytes)
        self.note(self.paths[descriptor], "write", offset + num_bytes, b"")

    def truncate(self, descriptor, num_bytes):
        super().truncate(descriptor, num_bytes)
        self.note(self.paths[descriptor], "length", num_bytes)

    def unlink(self, path):
        if path.exists():
            self.note(path.name, "unlink")
        super().unlink(path)

    def sync(self, descriptor):
        super().sync(descriptor)
        name = self.paths[descriptor]
        self.kept.update(
            at
            for at, change in enumerate(self.changes)
            if change[0] == name and change[1] in ("write", "length")
        )
        self.note(name, "synced")

    def sync_directory(self, path):
        super().sync_directory(path)
        self.kept.update(
            at for at, change in enumerate(self.changes) if change[1] in ("create", "unlink")
        )
        self.note("", "synced")


def left(changes, kept, chance, path):
    """Make a directory as a loss of power after these changes may leave it."""
    path.mkdir()
    contents = {}
    for at, (name, kind, *details) in enumerate(changes):
        is_sure, rest = at in kept, details
        if not is_sure and chance.random() < 0.5:
            if kind != "write":
                continue
            rest = some_sectors(chance, *rest)
        if kind == "create":
            contents[name] = bytearray()
        elif kind == "unlink":
            contents.pop(name, None)
        elif kind == "length" and name in contents:
            held = contents[name]
            contents[name] = held[: rest[0]] + bytes(max(0, rest[0] - len(held)))
        elif kind == "write" and name in contents:
            held, (offset, data) = contents[name], rest
            held += bytes(max(0, offset + len(data) - len(held)))
            held[offset : offset + len(data)] = data
    for name, content in contents.items():
        (path / name).write_bytes(content)


def some_sectors(chance, offset, data):
    """Return a part of a write that a loss of power may leave."""
    cuts = sorted(chance.randrange(len(data) // SECTOR + 2) * SECTOR for _ in range(2))
    start, stop = (max(0, cut - offset % SECTOR) for cut in cuts)
    return offset + start, data[start:stop]


def lived(path, seed):
    """Use a tier for a while; return its files and, by the number of changes, what a flush has promised.

    A promise: the key, its payload and generation, from which change to which it holds.
    """
    rng = random.Random(seed)
    files = LossyFiles()
    held, promised, ended = {}, {}, []
    disk = None

    def gone(keys):
        for key in keys:
            held.pop(key, None)
            if key in promised:
                ended.append((key, *promised.pop(key), len(files.changes)))

    for step in range(25):
        if disk is None:
            disk = Disk(path, CAPACITY, ahead=1, direct=rng.choice([None, False]), files=files)
            disk.evicting = lambda keys, _: gone(keys)
        action = rng.choice(["put", "put", "put", "delete", "flush", "uses", "close"])
        keys = [name_of(number) for number in rng.sample(range(40), rng.randint(2, 8))]
        if action == "put":
            sizes = [rng.choice([1000, 5000, 5000, 9000]) for _ in keys]
            records = [record_of(key, size, step) for key, size in zip(keys, sizes, strict=True)]
            gone(
                [k for k, size in zip(keys, sizes, strict=True) if held.get(k, (size,))[0] != size]
            )
            for key, size, outcome in zip(keys, sizes, disk.put(keys, records, 60), strict=True):
                if outcome is Outcome.STORED:
                    held[key] = (size, step)
        elif action == "delete":
            gone(keys)
            disk.delete(keys)
        elif action == "flush":
            disk.flush()
            for key, state in held.items():
                promised.setdefault(key, (*state, len(files.changes)))
        elif action == "uses":
            disk.touch(keys)
            disk._records.write_all()
        else:
            disk.close()
            disk = None
    if disk is not None:
        disk.close()
    return files, [*ended, *((key, *state, 1 << 60) for key, state in promised.items())]


@pytest.mark.parametrize("seed", range(4))
def test_what_was_flushed_is_there_after_a_loss_of_power_at_any_write(tmp_path, seed):
    files, promises = lived(tmp_path / "tier", seed)
    assert len(promises) > 5
    chance = random.Random(seed)
    num_promised = 0
    for end in range(1, len(files.changes) + 1, 3):
        # What was synced later was not yet when the power went.
        synced = [at for at in range(end) if files.changes[at][1] == "synced"]
        kept = {
            at
            for at in files.kept
            if any(at < sync and same(files.changes[at], files.changes[sync]) for sync in synced)
        }
        path = tmp_path / "left"
        left(files.changes[:end], kept, chance, path)
        there = {key: state for key, *state, since, until in promises if since <= end <= until}
        num_promised += len(there)
        with Disk(path, "1MiB", ahead=1) as disk:
            disk.check()
            for entry in list(disk.scan()):
                buffer = new_buffer(entry.num_bytes)
                outcome = disk.get([entry.key], [buffer], 60)[0]
                if entry.key in there:
                    state = there.pop(entry.key)
                    assert (outcome, buffer) == (Outcome.HIT, record_of(entry.key, *state)), end
            assert not there, f"after change {end}"
        shutil.rmtree(path)
    assert num_promised > 100


def same(change, sync):
    """Whether a sync is one of what a change was made to."""
    if sync[0]:
        return change[0] == sync[0] and change[1] in ("write", "length")
    return change[1] in ("create", "unlink")


def test_a_flush_syncs_the_records_before_their_entries_and_the_directory(tmp_path):
    files = LossyFiles()
    with Disk(tmp_path, "1MiB", ahead=1, files=files) as disk:
        keys = names_of(range(3))
        disk.put(keys, [record_of(key) for key in keys], 10)
        del files.changes[:]
        disk.flush()
    synced = [change[0] for change in files.changes if change[1] == "synced"]
    assert synced == ["slab-1152.quire", "index-1152.quire", ""]
