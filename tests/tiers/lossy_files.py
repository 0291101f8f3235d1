"""Files of a disk tier on a device that loses power: what was synced stays, of the rest what chance decides.

Used by `test_disk_power.py` and by `benchmarks/crash_disk.py`.
"""

import threading

from quire.tiers.disk.files import DiskFiles

SECTOR = 512


class LossyFiles(DiskFiles):
    """Files that note every change and every sync, as (file, kind, ...), in order: `changes`.

    A file is its name and a number, which tells apart those that had the name one after the other. What
    is done to names is noted under the name alone, and a sync of the directory under no name.
    """

    def __init__(self, changes=()):
        self.changes = [tuple(change) for change in changes]
        self.lock = threading.RLock()
        self._count = 0
        self._by_name = {}
        self._by_descriptor = {}
        for name, kind, *details in self.changes:
            if kind == "create":
                self._count += 1
                self._by_name[name] = details[0]

    def note(self, *change):
        self.changes.append(change)

    def open(self, path, flags):
        with self.lock:
            is_new = not path.exists()
            descriptor = super().open(path, flags)
            if is_new:
                self._by_name[path.name] = f"{path.name}:{self._count}"
                self._count += 1
                self.note(path.name, "create", self._by_name[path.name])
            self._by_descriptor[descriptor] = self._by_name[path.name]
            return descriptor

    def write_at(self, descriptor, data, offset):
        with self.lock:
            super().write_at(descriptor, data, offset)
            self.note(self._by_descriptor[descriptor], "write", offset, bytes(data))

    def write_run(self, descriptor, parts, offset):
        for part in parts:
            self.write_at(descriptor, part, offset)
            offset += len(part)

    def allocate(self, descriptor, offset, num_bytes):
        with self.lock:
            super().allocate(descriptor, offset, num_bytes)
            self.note(self._by_descriptor[descriptor], "write", offset + num_bytes, b"")

    def truncate(self, descriptor, num_bytes):
        with self.lock:
            super().truncate(descriptor, num_bytes)
            self.note(self._by_descriptor[descriptor], "length", num_bytes)

    def unlink(self, path):
        with self.lock:
            if path.exists():
                self.note(path.name, "unlink")
                self._by_name.pop(path.name, None)
            super().unlink(path)

    def sync(self, descriptor):  # of the device that is modelled: the one below need not
        with self.lock:
            self.note(self._by_descriptor[descriptor], "synced")

    def sync_directory(self, path):
        with self.lock:
            self.note("", "synced")


def as_there(directory):
    """Return changes, all synced, that make what a directory has."""
    changes = []
    for number, path in enumerate(sorted(directory.iterdir())):
        file = f"{path.name}:{number}"
        changes.append((path.name, "create", file))
        changes.append((file, "write", 0, path.read_bytes()))
        changes.append((file, "synced"))
    return [*changes, ("", "synced")]


def left(changes, chance):
    """Return the contents by name that a loss of power after these changes may leave."""
    synced = {file: at for at, (file, kind, *_) in enumerate(changes) if kind == "synced"}
    names, contents = {}, {}
    for at, (file, kind, *details) in enumerate(changes):
        by = "" if kind in ("create", "unlink") else file
        if at > synced.get(by, -1) and chance.random() < 0.5:
            if kind != "write":
                continue
            details[:] = some_sectors(chance, *details)
            if not details[1]:
                continue
        if kind == "create":
            names[file] = details[0]
        elif kind == "unlink":
            names.pop(file, None)
        elif kind == "length":
            held = contents.get(file, b"")[: details[0]]
            contents[file] = bytearray(held.ljust(details[0], b"\0"))
        elif kind == "write":
            held, (offset, data) = contents.setdefault(file, bytearray()), details
            held += bytes(max(0, offset + len(data) - len(held)))
            held[offset : offset + len(data)] = data
    return {name: bytes(contents.get(file, b"")) for name, file in names.items()}


def some_sectors(chance, offset, data):
    """Return a part of a write that a loss of power may leave."""
    cuts = sorted(chance.randrange(len(data) // SECTOR + 2) * SECTOR for _ in range(2))
    start, stop = (max(0, cut - offset % SECTOR) for cut in cuts)
    return offset + start, data[start:stop]
