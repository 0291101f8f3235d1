"""Kill processes that write to a disk tier, again and again, and read what they left.

    python benchmarks/crash_disk.py --kills 2000 [--seed 0] [--mode all]

Each round forks one to three writers, one after the other, on one directory. A writer opens it, reads all that is there,
puts, replaces, deletes, evicts, flushes, writes its indexes anew, closes and opens again, with small capacities that change, so
that all of it happens often; past the page cache, by it, or by it for bursts; in some rounds with two threads that write and
one that flushes, reads, uses, lists and checks what both have, taking turns after a few bytecodes or as usual. It dies by SIGKILL

    before, within, after   its n-th file operation, n drawn at random; `within` a write: after some of the bytes
    time                    at a random time, from outside
    power                   at an operation, and what was not synced is lost in part, sector by sector

and the next one opens what it left, dies in that, or after it. It tells by a file what it is about to do and what came of
it. At the end the directory is opened once more and every record in it is read.

    - a record that was `STORED`, and not deleted or evicted since, is there, byte for byte
    - what was deleted or evicted is not there
    - nothing is corrupt; no index is damaged but by a write that was done in part

After `power` what was there when a `flush` began that returned still is; other records may be gone or be refused as
corrupt, and what was deleted may be back, as it was put. Never, in no mode, is a hit anything but bytes that were put under its key.
"""

import argparse
import errno
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from functools import lru_cache
from pathlib import Path

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests" / "tiers"))

from crash_model import Expected
from lossy_files import LossyFiles, as_there, left

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, record_of
from quire.tiers.disk import Disk
from quire.tiers.disk.files import takes_direct
from quire.tiers.format import new_buffer, read_header, record_bytes

MODES = ("before", "within", "after", "time", "power")
PAYLOADS = (0, 100, 1000, 5000, 70_000)
CAPACITIES = (250_000, 400_000, 600_000)
NUM_KEYS = 80
SESSIONS = 4
STEPS = 16
AWAKE_S = 0.15
"""About how long a writer runs that nobody kills."""

PLACES = ("_open", "close", "fit", "_shrinks", "move", "_evicts", "write_all", "prewrite", "flush", "drop", "commit", "put")  # fmt: skip
"""Functions within which a kill is counted, the outermost first."""

known_record = lru_cache(maxsize=4096)(record_of)


class KillingFiles(LossyFiles):
    """File operations, the n-th of which is the last of the process; a share of `full` finds no space."""

    def __init__(self, changes, kill_at, mode, rng):
        super().__init__(changes)
        self.count = 0
        self.full = rng.choice([0, 0, 0.2])
        self.die = None
        self._kill_at, self._mode, self._rng = kill_at, mode, rng

    def open(self, *args):
        return self._at_a_point(super().open, *args)

    def write_at(self, descriptor, data, offset):
        unit = 4096 if len(data) % 4096 == 0 else 1
        part = data[: self._rng.randrange(len(data) // unit + 1) * unit]
        self._at_a_point(
            super().write_at, descriptor, data, offset, within=(descriptor, part, offset)
        )

    def allocate(self, *args):
        if self.full and self._rng.random() < self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._at_a_point(super().allocate, *args)

    def truncate(self, *args):
        self._at_a_point(super().truncate, *args)

    def unlink(self, *args):
        self._at_a_point(super().unlink, *args)

    def sync(self, *args):
        self._at_a_point(super().sync, *args)

    def sync_directory(self, *args):
        self._at_a_point(super().sync_directory, *args)

    def _at_a_point(self, call, *args, within=()):
        with self.lock:
            self.count += 1
            is_last = self.count == self._kill_at
            if is_last and self._mode == "within" and within and len(within[1]):
                call(*within)
            if is_last and self._mode in ("before", "within"):
                self.die()
            result = call(*args)
            if is_last:
                self.die()
            return result


class Writer:
    """A process that uses a directory and tells what it does; `root` has the directory, what it told, and what it changed."""

    def __init__(self, root, life, kill_at, mode, rng):
        self.root = root
        self.mode = mode
        self.rng = rng
        self.generation = 1000 * life
        self.telling = threading.Lock()
        self.told = os.open(root / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        saved = root / "changes"
        changes = as_there(root / "tier")
        if saved.exists():
            changes = msgspec.msgpack.decode(saved.read_bytes())
            saved.unlink()  # a kill from outside leaves none
        self.files = KillingFiles(changes, kill_at, mode, random.Random(rng.random()))
        self.files.die = self.die

    def tell(self, kind, *details):
        with self.telling:
            os.write(self.told, msgspec.json.encode([kind, *details]) + b"\n")

    def die(self):
        """End the process as a kill does, or a loss of power."""
        frames, frame = set(), sys._getframe()
        while frame:
            frames.add(frame.f_code.co_name)
            frame = frame.f_back
        self.tell("dies", next((name for name in PLACES if name in frames), "else"))
        if self.mode == "power":
            contents = left(self.files.changes, self.rng)
            for path in (self.root / "tier").iterdir():
                path.unlink()
            for name, content in contents.items():
                (self.root / "tier" / name).write_bytes(content)
        else:
            self.save()
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)

    def save(self):
        """Leave the changes for the next, of whose losses of power they are as well."""
        whole = self.root / "changes.whole"
        whole.write_bytes(msgspec.msgpack.encode(self.files.changes))
        whole.rename(self.root / "changes")

    def run(self):
        for _ in range(SESSIONS):
            capacity = self.rng.choice(CAPACITIES)
            num_threads = self.rng.choice([1, 1, 2])
            self.tell("opens", capacity, num_threads == 1)
            direct = self.rng.choice([None, None, False, takes_direct(self.root)])
            options = {"ahead": 30_000, "files": self.files, "direct": direct}
            with Disk(self.root / "tier", capacity, **options) as disk:
                if disk._cache is not None:  # so that some writes go past it
                    disk._cache.limit_bytes = self.rng.choice([1 << 20, 150_000])
                disk.evicting = lambda keys, _: self.tell("evicts", [key.hex() for key in keys])
                self.tell("found", read_all(disk))
                if num_threads == 1:
                    self.use(disk, self.rng, range(NUM_KEYS), flushes=True)
                else:
                    self.use_from_threads(disk, num_threads)
            self.tell("closed")
        self.save()

    def use_from_threads(self, disk, num_threads):
        """Use it from several threads, each with keys of its own, while one more flushes, reads and uses all of them."""
        is_over = threading.Event()
        keys = [name_of(number) for number in range(NUM_KEYS)]
        rng = random.Random(self.rng.random())
        sys.setswitchinterval(rng.choice([1e-6, 0.005]))

        def use_beside():
            while not is_over.wait(0.005):
                self.flush(disk)
                get(disk, rng, rng.sample(keys, 10))
                disk.touch(rng.sample(keys, 5))
                disk.check()
                list(disk.scan())

        threads = [
            threading.Thread(
                target=self.use,
                args=(disk, random.Random(self.rng.random()), range(at, NUM_KEYS, num_threads)),
            )
            for at in range(num_threads)
        ]
        beside = threading.Thread(target=use_beside)
        for thread in (*threads, beside):
            thread.start()
        for thread in threads:
            thread.join()
        is_over.set()
        beside.join()

    def use(self, disk, rng, numbers, *, flushes=False):
        for _ in range(STEPS):
            self.generation += 1
            generation = self.generation
            action = rng.choice(["put"] * 6 + ["delete", "touch", "get", "rewrite", "flush"])
            keys = [name_of(number) for number in rng.sample(numbers, rng.randint(1, 6))]
            names = [key.hex() for key in keys]
            if action == "put":
                payloads = [rng.choice(PAYLOADS) for _ in keys]
                self.tell("puts", names, payloads, generation)
                records = [
                    known_record(key, payload, generation)
                    for key, payload in zip(keys, payloads, strict=True)
                ]
                outcomes = disk.put(keys, records, timeout_s=60)
                self.tell("put", names, payloads, generation, outcomes)
            elif action == "delete":
                self.tell("deletes", names)
                disk.delete(keys)
                self.tell("deleted", names)
            elif action == "touch":
                disk.touch(keys)
            elif action == "get":
                get(disk, rng, keys)
            elif action == "flush" and flushes:
                self.flush(disk)
            elif action == "rewrite" and rng.random() < 0.5:
                disk.settle(10)
                disk._records.write_all()

    def flush(self, disk):
        self.tell("flushes")
        disk.flush()
        self.tell("flushed")


def get(disk, rng, keys):
    """Read records, some of which may have the size that is asked for."""
    buffers = [new_buffer(record_bytes(rng.choice(PAYLOADS))) for _ in keys]
    for key, outcome, buffer in zip(keys, disk.get(keys, buffers, 60), buffers, strict=True):
        if outcome is Outcome.HIT:
            state_of(key, buffer)


def state_of(key, record):
    """Return payload bytes and generation of a record that was read, and check that it is as it was put."""
    header = read_header(record)
    state = (header.payload_bytes, header.generation)
    assert record == known_record(key, *state), f"{key.hex()} has wrong bytes"
    return state


def read_all(disk):
    """Return what a tier has, [name, state]; the state is None where it was refused as corrupt."""
    disk.check()
    found = []
    for entry in list(disk.scan()):
        buffer = new_buffer(entry.num_bytes)
        (outcome,) = disk.get([entry.key], [buffer], timeout_s=60)
        state = None
        if outcome is Outcome.HIT:
            state = state_of(entry.key, buffer)
        elif outcome is not Outcome.CORRUPT and not (
            disk.is_read_only and outcome is Outcome.ABSENT
        ):
            raise AssertionError(f"{entry.key.hex()} is {outcome}")
        found.append((entry.key.hex(), state))
    return found


def verify(directory, expected, *, may_be_torn):
    """Open what dead writers left and read all of it; return what was found, counted.

    `may_be_torn`  whether a write may have been done in part
    """
    with Disk(directory, read_only=True) as reader:
        seen = read_all(reader)
        recovered = reader.recovered
        is_damaged = recovered.num_rebuilt or recovered.num_lost
        assert may_be_torn or not is_damaged, f"an index is damaged: {recovered}"
    with Disk(directory, max(CAPACITIES) * 2, ahead=30_000) as disk:
        found = read_all(disk)
        assert sorted(seen) == sorted(found), "a reader sees something else"
        expected.check(found)
        disk.check()
        fresh = name_of(10_000)
        assert disk.put([fresh], [known_record(fresh, 1000)], timeout_s=60) == [Outcome.STORED]
        entries = sorted(entry.key for entry in disk.scan())
    with Disk(directory, max(CAPACITIES) * 2) as disk:
        disk.check()
        assert disk.recovered.is_clean
        assert sorted(entry.key for entry in disk.scan()) == entries
    is_hit = [bool(state) for _, state in found]
    return Counter({"right": sum(is_hit), "corrupt": len(is_hit) - sum(is_hit)})


def run_writer(root, life, kill_at, mode, rng):
    """Fork a writer and wait for its end; return what it told and whether it was killed."""
    (root / "told").unlink(missing_ok=True)
    process = os.fork()
    if not process:
        threading.excepthook = lambda hooked: fail(hooked.exc_value)
        try:
            Writer(root, life, kill_at, mode, rng).run()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - told, and the parent asserts
            fail(error)
    if mode == "time":
        time.sleep(rng.random() * AWAKE_S)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status), "the writer failed"
    told = (root / "told").read_bytes() if (root / "told").exists() else b""
    # What lacks its end was not told, so what it tells of did not begin.
    return [msgspec.json.decode(line) for line in told.split(b"\n")[:-1]], os.WIFSIGNALED(status)


def fail(error):
    """End a writer, whichever of its threads failed."""
    traceback.print_exception(error)
    os._exit(1)


def run_round(seed, modes, operations):
    """Run one to three writers on a directory, and check what they left; return counts."""
    rng = random.Random(seed)
    counts = Counter(rounds=1)
    may_be_torn = False
    expected = Expected([name_of(number).hex() for number in range(NUM_KEYS)])
    with tempfile.TemporaryDirectory(prefix="quire-crash-") as name:
        root = Path(name)
        (root / "tier").mkdir()
        for life in range(rng.choice([1, 1, 2, 3])):
            mode = rng.choice(modes)
            soon = life and rng.random() < 0.5  # within opening, as a rule
            kill_at = 0 if mode == "time" else rng.randint(1, 30 if soon else operations)
            own = random.Random(rng.random())
            events, was_killed = run_writer(root, life, kill_at, mode, own)
            for event in events:
                expected.hear(*event)
                if event[0] == "dies":
                    counts[f"within {event[1]}"] += 1
            may_be_torn |= was_killed and mode in ("within", "power")
            expected.ended(lost_power=was_killed and mode == "power")
            counts["kills"] += was_killed
            counts[f"killed: {mode}"] += was_killed
        return counts + verify(root / "tier", expected, may_be_torn=may_be_torn)


def crash(kills, seed=0, modes=MODES, seconds=float("inf"), first=0):
    """Run rounds until so many writers were killed, or time is up; return what was found, counted."""
    counts = Counter()
    for number in range(NUM_KEYS):
        for payload in PAYLOADS:
            known_record(name_of(number), payload, 0)
    give_up = time.monotonic() + seconds
    number = first
    while counts["kills"] < kills and time.monotonic() < give_up:
        try:
            counts += run_round(f"{seed} {number}", modes, 500)
        except Exception as error:
            raise AssertionError(f"seed {seed}, round {number}: {error}") from error
        number += 1
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=("all", *MODES), default="all")
    parser.add_argument("--first", type=int, default=0, help="round to begin with")
    options = parser.parse_args()
    began = time.monotonic()
    modes = MODES if options.mode == "all" else (options.mode,)
    counts = crash(options.kills, options.seed, modes, first=options.first)
    print(f"{time.monotonic() - began:.0f} s")
    for name, count in sorted(counts.items()):
        print(f"{name:20} {count}")


if __name__ == "__main__":
    main()
