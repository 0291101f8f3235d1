"""Read records whose bytes were changed, and count what came back that was never put.

    python benchmarks/fuzz_records.py                       200,000 mutated records, about 5 minutes
    python benchmarks/fuzz_records.py --records 5000 --only format,disk --seed 7
    python benchmarks/fuzz_records.py --atheris 60          coverage-guided, where atheris is installed

`format` calls `verify` on bytes. The others put records into a tier, change them where the tier keeps
them, behind its back, and read all of them through `Tier.get`; `slabs` damages every file of a disk
tier's directory, or puts older ones back, and opens it again. What a mutation is: `tests/tiers/mutations.py`, and `damages.py` there.
The exit status is 1 where a single byte was wrong or anything but a `QuireError` was raised.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / each) for each in ("src", "tests", "tests/tiers")]

from damages import damaged  # noqa: E402 - behind the path
from mutations import MUTATIONS, Victim, files_in, key_in, make_victim, mutated, records_in  # noqa: E402 - behind the path

from quire.errors import QuireError, RecordError  # noqa: E402 - behind the path
from quire.tiers.base import Outcome, Tier, checked  # noqa: E402 - behind the path
from quire.tiers.format import new_buffer, verify  # noqa: E402 - behind the path

BATCH = 128
CAPACITY = "24MiB"
SHARES = {"format": 0.4, "host": 0.1, "disk": 0.1, "files": 0.1, "objects": 0.05, "redis": 0.1, "slabs": 0.15}  # fmt: skip


class Found:
    """The results of reading: outcomes, and every record that was wrong."""

    def __init__(self) -> None:
        self.num_mutated = 0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def note(self, victim: Victim, outcome: Outcome, content: memoryview | bytes, how: str) -> None:
        is_read = outcome is Outcome.HIT and victim.reads(content)
        self.outcomes[
            outcome.value if is_read or outcome is not Outcome.HIT else "another part's"
        ] += 1
        if is_read and not victim.may_be_read(content):
            self.wrong.append(f"{how}: key {victim.key.hex()}, {len(victim.record)} bytes")


def fuzz_format(found: Found, count: int, chance: random.Random) -> None:
    """Mutate records and verify them, 25 mutations of each."""
    while found.num_mutated < count:
        victim = make_victim(chance, found.num_mutated)
        for _ in range(25):
            name, content = mutated(chance, victim)
            outcome = Outcome.CORRUPT
            try:
                if verify(content).key == victim.key:
                    outcome = Outcome.HIT
            except RecordError:
                pass
            found.note(victim, outcome, content, name)
            if checked(victim.key, memoryview(content)) is Outcome.HIT and outcome != Outcome.HIT:
                found.wrong.append(f"{name}: verify and checked disagree")
            found.num_mutated += 1


def fuzz_tier(
    found: Found, count: int, chance: random.Random, change: "Change", tier: Tier
) -> None:
    """Put records, change them behind the tier's back, read them, put them again and read again."""
    number = 0
    while found.num_mutated < count:
        victims = [make_victim(chance, number + index) for index in range(BATCH)]
        number += BATCH
        keys = [victim.key for victim in victims]
        stored = _put(tier, victims)
        if set(stored) != {Outcome.STORED}:
            raise SystemExit(f"{tier!r} did not take all records: {Counter(stored)}")
        tier.flush()
        how = change(chance, {victim.key: victim for victim in victims})
        found.num_mutated += len(how)
        _read(found, tier, victims, how)
        again = _put(tier, victims)
        found.outcomes["stored again"] += again.count(Outcome.STORED)
        _read(found, tier, victims, dict.fromkeys(keys, "put again"))
        tier.delete(keys, 30)
        tier.check()


Change = Callable[[random.Random, dict[bytes, Victim]], dict[bytes, str]]
"""Changes what a tier keeps of these victims; returns how, by key."""


def in_files(folder: Path) -> Change:
    """Change records where they stand in the files of a folder; neighbours may be hit as well."""

    def change(chance: random.Random, victims: dict[bytes, Victim]) -> dict[bytes, str]:
        how: dict[bytes, str] = {}
        for path in files_in(folder):
            places = [(key, at) for key, at in records_in(path.read_bytes()) if key in victims]
            alone = len(places) == 1 and path.stat().st_size == len(victims[places[0][0]].record)
            for key, at in places:
                how[key], content = mutated(chance, victims[key])
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(content)
                    if alone:
                        file.truncate(len(content))
        return how

    return change


def in_memory(arena: memoryview) -> Change:
    """Change records where they stand in an arena."""

    def change(chance: random.Random, victims: dict[bytes, Victim]) -> dict[bytes, str]:
        how: dict[bytes, str] = {}
        for key, at in list(records_in(bytes(arena))):
            if key in victims:
                how[key], content = mutated(chance, victims[key])
                content = content[: len(arena) - at]
                arena[at : at + len(content)] = content
        return how

    return change


def in_redis(client: Any) -> Change:
    """Change values of a Redis server."""

    def change(chance: random.Random, victims: dict[bytes, Victim]) -> dict[bytes, str]:
        how: dict[bytes, str] = {}
        for name in client.scan_iter(count=1000):
            for key, at in records_in(client.get(name)):
                if key in victims and at == 0:
                    how[key], content = mutated(chance, victims[key])
                    client.set(name, content)
        return how

    return change


def fuzz_slabs(found: Found, count: int, chance: random.Random) -> None:
    """Damage the files of a closed disk tier, open it and read; an opening may be refused."""
    from quire.tiers.disk import Disk

    while found.num_mutated < count:
        with tempfile.TemporaryDirectory() as name:
            folder, earlier, stranger = (
                Path(name, each) for each in ("now", "earlier", "stranger")
            )
            sizes = chance.choice(((500,), (500, 1000, 4000), (64, 65_408)))
            victims = [
                make_victim(chance, index, chance.choice(sizes)) for index in range(2 * BATCH)
            ]
            with Disk(stranger, "4MiB", ahead=1) as disk:
                others = victims[BATCH:] if chance.random() < 0.5 else victims
                _put(disk, [v._replace(key=key_in(v.other), record=v.other) for v in others])
            for half in (victims[:BATCH], victims[BATCH:]):
                with Disk(folder, "16MiB", ahead=1) as disk:
                    disk.delete([victim.key for victim in victims[: BATCH // 4]])
                    _put(disk, half)
                if not earlier.exists():
                    shutil.copytree(folder, earlier)
            how = dict.fromkeys(
                (v.key for v in victims), damaged(chance, folder, [earlier, stranger])
            )
            found.num_mutated += len(victims)
            try:
                with Disk(folder, read_only=True) as reader:
                    _read(found, reader, victims, how)
                with Disk(folder, "16MiB", ahead=1) as disk:
                    _read(found, disk, victims, how)
                    _put(disk, victims)
                    _read(found, disk, victims, how)
                    disk.check()
            except QuireError as error:
                found.outcomes[f"refused: {type(error).__name__}"] += 1


def _put(tier: Tier, victims: list[Victim]) -> list[Outcome]:
    return tier.put([v.key for v in victims], [_buffer(v.record) for v in victims], 30)


def _read(found: Found, tier: Tier, victims: list[Victim], how: dict[bytes, str]) -> None:
    buffers = [new_buffer(len(victim.record)) for victim in victims]
    outcomes = tier.get([victim.key for victim in victims], buffers, 30)
    for victim, outcome, buffer in zip(victims, outcomes, buffers, strict=True):
        found.note(victim, outcome, buffer, how.get(victim.key, "not changed"))


def _buffer(record: bytes) -> memoryview:
    buffer = new_buffer(len(record))
    buffer[:] = record
    return buffer


@contextmanager
def tier_for(name: str) -> Iterator[tuple[Tier, Change]]:
    """Open an empty tier of this name, and give what changes its records."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "host":
            from quire.tiers.host import Host

            with Host(CAPACITY) as tier:
                yield tier, in_memory(tier._arena.memory.data)
        elif name == "disk":
            from quire.tiers.disk import Disk

            with Disk(Path(folder), CAPACITY) as tier:
                yield tier, in_files(Path(folder))
        elif name == "files":
            from quire.tiers.files import Files

            with Files(Path(folder)) as tier:
                yield tier, in_files(Path(folder))
        elif name == "objects":
            from obstore.store import LocalStore

            from quire.tiers.objects import Objects

            with Objects(LocalStore(folder)) as tier:
                yield tier, in_files(Path(folder))
        elif name == "redis":
            from servers import running

            from quire.tiers.redis import Redis

            with (
                running(Path(folder)) as server,
                Redis(server.url) as tier,
                server.client() as client,
            ):
                yield tier, in_redis(client)


def fuzz(name: str, count: int, seed: int) -> Found:
    """Read `count` mutated records one way; the same seed mutates the same."""
    found, chance = Found(), random.Random(f"{seed} {name}")
    if name == "format":
        fuzz_format(found, count, chance)
    elif name == "slabs":
        fuzz_slabs(found, count, chance)
    else:
        with tier_for(name) as (tier, change):
            fuzz_tier(found, count, chance, change, tier)
    return found


def fuzz_with_coverage(seconds: int) -> None:
    """Let atheris choose the bytes: those of a record, and those of its mutations."""
    try:
        import atheris
    except ImportError:
        raise SystemExit("--atheris needs atheris: pip install atheris") from None
    from quire.tiers import format as records

    records.read_header = atheris.instrument_func(records.read_header)
    verify_it = atheris.instrument_func(records.verify)
    victims = [make_victim(random.Random(size), size, size) for size in (0, 1, 64, 1000)]
    names = list(MUTATIONS)

    def one(data: bytes) -> None:
        source = atheris.FuzzedDataProvider(data)
        victim = victims[source.ConsumeIntInRange(0, len(victims) - 1)]
        content = data
        if source.ConsumeBool():
            chance = random.Random(source.ConsumeInt(8))
            content = MUTATIONS[names[source.ConsumeIntInRange(0, len(names) - 1)]](chance, victim)
            patch = source.ConsumeBytes(16)
            at = source.ConsumeIntInRange(0, len(content))
            content = content[:at] + patch + content[at + len(patch) :]
        try:
            header = verify_it(content)
        except RecordError:
            return
        known = [v for v in victims if v.key == header.key]
        if known and not known[0].may_be_read(content) and known[0].reads(content):
            raise AssertionError(f"wrong bytes for {header.key.hex()}")

    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=2048"], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(SHARES), help="of " + ",".join(SHARES))
    parser.add_argument("--atheris", type=int, metavar="SECONDS")
    asked = parser.parse_args()
    if asked.atheris is not None:
        fuzz_with_coverage(asked.atheris)
        return
    names = asked.only.split(",")
    whole = sum(SHARES[name] for name in names)
    total = num_wrong = 0
    for name in names:
        begun = time.perf_counter()
        found = fuzz(name, int(asked.records * SHARES[name] / whole) + 1, asked.seed)
        total += found.num_mutated
        num_wrong += len(found.wrong)
        shown = ", ".join(f"{count:,} {what}" for what, count in sorted(found.outcomes.items()))
        seconds = time.perf_counter() - begun
        print(
            f"{name:8}{found.num_mutated:>9,} mutated, {len(found.wrong)} wrong, {seconds:.0f} s: {shown}"
        )
        for line in found.wrong[:10]:
            print("    WRONG", line)
    print(f"{total:,} mutated records, {num_wrong} with wrong bytes, seed {asked.seed}")
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
