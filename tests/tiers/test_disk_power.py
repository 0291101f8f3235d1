"""A loss of power at any moment, on files that keep what was synced, and of the rest what chance decides."""

import random
import shutil

import pytest
from lossy_files import LossyFiles, left

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, names_of, record_of
from quire.tiers.directory import MARKER
from quire.tiers.disk import Disk
from quire.tiers.format import new_buffer
from turns import few

CAPACITY = 120_000


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


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", few(range(4), 0, 1))
def test_flushed_records_outlive_a_loss_of_power_at_any_write(tmp_path, seed):
    files, promises = lived(tmp_path / "tier", seed)
    assert len(promises) > 5
    chance = random.Random(seed)
    num_promised = 0
    for end in range(1, len(files.changes) + 1, 3):
        path = tmp_path / "left"
        path.mkdir()
        shutil.copy(tmp_path / "tier" / MARKER, path)  # synced before anything else
        for name, content in left(files.changes[:end], chance).items():
            (path / name).write_bytes(content)
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


def test_a_flush_syncs_the_records_before_their_entries_and_the_directory(tmp_path):
    files = LossyFiles()
    with Disk(tmp_path, "1MiB", ahead=1, files=files) as disk:
        keys = names_of(range(3))
        disk.put(keys, [record_of(key) for key in keys], 10)
        del files.changes[:]
        disk.flush()
    synced = [change[0] for change in files.changes if change[1] == "synced"]
    assert synced == ["slab-1216.quire:1", "index-1216.quire:2", ""]
