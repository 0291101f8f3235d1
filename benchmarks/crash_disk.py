"""Kills a process that writes to a disk tier, again and again, and reads what it left.

    python benchmarks/crash_disk.py --kills 2000 [--seed 0] [--mode all]

Each round forks a writer that puts, deletes, evicts, writes its index anew, closes and reopens, with small
capacities so that all of it happens often. The writer dies by SIGKILL

    before, within, after   its n-th file operation, n drawn at random; `within` a write: after some of the bytes
    time                    at a random time, from outside
    power                   at an operation, and of the writes before it some were lost or done in part

It tells by a pipe what it is about to do and what came of it. Then the directory is opened again and every
record in it is read. Except after `power`:

    - a record that was `STORED`, and not deleted or evicted since, is there, byte for byte
    - what was deleted or evicted is not there
    - nothing is corrupt

After `power` records may be gone or be refused as corrupt. Never, in no mode, is a hit anything but the bytes that
were put under its key.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from functools import lru_cache
from pathlib import Path

import msgspec

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, record_of
from quire.tiers.disk import Disk
from quire.tiers.disk.files import DiskFiles
from quire.tiers.format import new_buffer, read_header, record_bytes

MODES = ("before", "within", "after", "time", "power")
PAYLOADS = (0, 100, 1000, 5000, 70_000)
CAPACITY = 400_000
NUM_KEYS = 80
STEPS = 60
LOSSY_OPERATIONS = 30

known_record = lru_cache(maxsize=4096)(record_of)


class KillingFiles(DiskFiles):
    """File operations, the n-th of which is the last."""

    def __init__(self, kill_at, mode, rng):
        self.count = 0
        self.kill_at = kill_at
        self.mode = mode
        self.rng = rng

    def open(self, path, flags):
        self.count += 1
        if self.count == self.kill_at and self.mode != "after":
            die()
        descriptor = super().open(path, flags)
        if self.count == self.kill_at:
            die()
        return descriptor

    def write_at(self, descriptor, data, offset):
        self.count += 1
        may_lose = self.mode == "power" and self.count > self.kill_at - LOSSY_OPERATIONS
        if may_lose and self.rng.random() < 0.5:
            self.write_some(descriptor, data, offset)
        elif self.count != self.kill_at or self.mode == "after":
            super().write_at(descriptor, data, offset)
        elif self.mode == "within":
            self.write_some(descriptor, data, offset)
        if self.count >= self.kill_at:
            die()

    def write_run(self, descriptor, parts, offset):
        for part in parts:
            self.write_at(descriptor, part, offset)
            offset += len(part)

    def write_some(self, descriptor, data, offset):
        unit = 4096 if len(data) % 4096 == 0 else 1
        length = self.rng.randrange(len(data) // unit + 1) * unit
        if length:
            super().write_at(descriptor, data[:length], offset)

    def allocate(self, *args):
        self.at_a_point(super().allocate, args)

    def truncate(self, *args):
        self.at_a_point(super().truncate, args)

    def unlink(self, *args):
        self.at_a_point(super().unlink, args)

    def at_a_point(self, call, args):
        self.count += 1
        if self.count == self.kill_at and self.mode != "after":
            die()
        call(*args)
        if self.count >= self.kill_at:
            die()


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


def open_disk(directory, **options):
    return Disk(directory, CAPACITY, ahead=30_000, **options)


def write(directory, seed, files, tell):
    """Run a writer's steps, telling each before and after."""
    rng = random.Random(seed)
    direct = rng.choice([None, False])
    disk = None
    for step in range(STEPS):
        if disk is None:
            disk = open_disk(directory, files=files, direct=direct)
            disk.evicting = lambda keys, _: tell(("evicts", [key.hex() for key in keys]))
        action = rng.choice(["put"] * 6 + ["delete", "touch", "get", "reopen"])
        numbers = rng.sample(range(NUM_KEYS), rng.randint(1, 6))
        keys = [name_of(number) for number in numbers]
        names = [key.hex() for key in keys]
        if action == "put":
            payloads = [rng.choice(PAYLOADS) for _ in keys]
            tell(("puts", names, payloads, step))
            records = [
                known_record(key, payload, step)
                for key, payload in zip(keys, payloads, strict=True)
            ]
            tell(("put", names, payloads, step, disk.put(keys, records, timeout_s=60)))
        elif action == "delete":
            tell(("deletes", names))
            disk.delete(keys)
            tell(("deleted", names))
        elif action == "touch":
            disk.touch(keys)
        elif action == "get":
            disk.get(keys, [new_buffer(record_bytes(1000)) for _ in keys])
        elif rng.random() < 0.3:
            disk.close()
            disk = None
        if disk and rng.random() < 0.05:
            disk.settle(10)
            disk._records.write_all()
    if disk:
        disk.close()


def states_after(events):
    """Return for each key what may be there: None, or (payload bytes, generation)."""
    states = {name_of(number).hex(): {None} for number in range(NUM_KEYS)}
    evicted = set()
    for kind, names, *rest in events:
        if kind == "evicts":
            evicted.update(names)
            for name in names:
                states[name] = states[name] | {None}
        elif kind == "puts":
            payloads, generation = rest
            for name, payload in zip(names, payloads, strict=True):
                others = {state for state in states[name] if state and state[0] != payload}
                made_room = {None} if others else set()  # as it may do for a record of another size
                states[name] = states[name] | {(payload, generation)} | made_room
        elif kind == "put":
            payloads, generation, outcomes = rest
            for name in evicted:
                states[name] = {None}
            evicted = set()
            for name, payload, outcome in zip(names, payloads, outcomes, strict=True):
                if outcome == "stored":
                    states[name] = {(payload, generation)}
                else:
                    states[name] = states[name] - {(payload, generation)}
        elif kind == "deletes":
            for name in names:
                states[name] = states[name] | {None}
        elif kind == "deleted":
            for name in names:
                states[name] = {None}
    return states


def verify(directory, states, mode):
    """Open what a dead writer left and read all of it; return what was found, counted."""
    counts = Counter()
    with open_disk(directory) as disk:
        disk.check()
        held = {entry.key: entry.num_bytes for entry in disk.scan()}
        for name, allowed in states.items():
            key = bytes.fromhex(name)
            if key not in held:
                assert mode == "power" or None in allowed, f"{name} is lost: {allowed}"
                counts["absent"] += 1
                continue
            buffer = new_buffer(held[key])
            (outcome,) = disk.get([key], [buffer], timeout_s=60)
            counts[outcome] += 1
            if outcome is not Outcome.HIT:
                assert mode == "power", f"{name} is {outcome}"
                assert outcome is Outcome.CORRUPT
                continue
            header = read_header(buffer)
            state = (header.payload_bytes, header.generation)
            assert buffer == record_of(key, *state), f"{name} has wrong bytes"
            assert state in allowed or mode == "power", f"{name} is {state}, not one of {allowed}"
        disk.check()
        fresh = name_of(10_000)
        assert disk.put([fresh], [known_record(fresh, 1000)], timeout_s=60) == [Outcome.STORED]
        left = sorted(entry.key for entry in disk.scan())
    with open_disk(directory) as disk:
        disk.check()
        assert sorted(entry.key for entry in disk.scan()) == left
    return counts


def run_writer(directory, seed, kill_at, mode):
    """Fork a writer and wait for its end; return its events and whether it was killed."""
    reading, writing = os.pipe()
    rng = random.Random(seed * 7919 + kill_at)
    process = os.fork()
    if not process:
        os.close(reading)
        stream = os.fdopen(writing, "wb", buffering=0)
        try:
            files = KillingFiles(kill_at, mode, rng)
            write(directory, seed, files, lambda event: stream.write(encoded(event)))
            stream.write(encoded(("end", [], files.count)))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - told, and the parent asserts
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    if mode == "time":
        time.sleep(rng.random() * 0.06)
        os.kill(process, signal.SIGKILL)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, f"seed {seed}: the writer failed"
    events = [msgspec.json.decode(line) for line in data.split(b"\n") if line]
    return events, os.WIFSIGNALED(status)


def encoded(event):
    return msgspec.json.encode(event) + b"\n"


def crash(kills, seed=0, modes=MODES, seconds=float("inf")):
    """Run rounds until so many writers were killed, or time is up; return what was found, counted."""
    counts = Counter()
    rng = random.Random(seed)
    known_record.cache_clear()
    for number in range(NUM_KEYS):
        for payload in PAYLOADS:
            known_record(name_of(number), payload, 0)
    operations = 300
    give_up = time.monotonic() + seconds
    while counts["kills"] < kills and time.monotonic() < give_up:
        mode = rng.choice(modes)
        kill_at = 10**9 if mode == "time" else rng.randint(1, operations)
        round_seed = rng.randrange(1 << 30)
        directory = Path(tempfile.mkdtemp(prefix="quire-crash-"))
        try:
            events, was_killed = run_writer(directory, round_seed, kill_at, mode)
            if events and events[-1][0] == "end":
                operations = max(operations * 9 // 10, events.pop()[2])
            try:
                counts.update(verify(directory, states_after(events), mode))
            except Exception as error:
                raise AssertionError(
                    f"mode {mode}, seed {round_seed}, operation {kill_at}: {error}"
                ) from error
            counts["kills"] += was_killed
            counts[f"killed: {mode}"] += was_killed
            counts["rounds"] += 1
        finally:
            shutil.rmtree(directory)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=("all", *MODES), default="all")
    options = parser.parse_args()
    began = time.monotonic()
    modes = MODES if options.mode == "all" else (options.mode,)
    counts = crash(options.kills, options.seed, modes)
    print(f"{time.monotonic() - began:.0f} s")
    for name, count in sorted(counts.items()):
        print(f"{name:20} {count}")


if __name__ == "__main__":
    main()
