"""Bytes that changed are never read as what was put; `benchmarks/fuzz_records.py` runs the same for longer."""

import contextlib
import random
import shutil
from functools import partial

import pytest
from damages import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import MUTATIONS, make_record, make_victim, mutated, records_in

from quire.errors import RecordError, TierError
from quire.tiers.base import ListedRecord, Outcome, Tier, checked
from quire.tiers.disk import Disk
from quire.tiers.files import Files
from quire.tiers.format import HEADER_BYTES, new_buffer, verify
from quire.tiers.host import Host

HIT, ABSENT = Outcome.HIT, Outcome.ABSENT
STORED, PRESENT = Outcome.STORED, Outcome.PRESENT
REFUSED = {Outcome.CORRUPT, Outcome.FOREIGN}

VICTIMS = [make_victim(random.Random(size), size, size) for size in (0, 1, 64, 1000, 65_500)]


def is_refused(content):
    try:
        verify(content)
    except RecordError:
        return True
    return False


@given(content=st.binary(max_size=600))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_bytes_that_nobody_sealed_are_no_record(content):
    assert is_refused(content)


@given(victim=st.sampled_from(VICTIMS[:4]), where=st.data())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_a_record_with_any_bytes_replaced_is_refused(victim, where):
    start = where.draw(st.integers(0, len(victim.record) - 1))
    patch = where.draw(st.binary(min_size=1, max_size=len(victim.record) - start))
    changed = victim.record[:start] + patch + victim.record[start + len(patch) :]
    assert is_refused(changed) == (changed != victim.record)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name != "is_an_older_record"])
@given(victim=st.sampled_from(VICTIMS), chance=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_mutated_record_is_read_only_if_unchanged(name, victim, chance):
    content = MUTATIONS[name](chance, victim)
    outcome = checked(victim.key, memoryview(content))
    if outcome is HIT:
        assert victim.may_be_read(content) or not victim.reads(content)
    else:
        assert outcome in REFUSED
        assert content not in (victim.record, victim.older)


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_changes_most_records(name):
    chance = random.Random(name)
    made = [MUTATIONS[name](chance, victim) for _ in range(20) for victim in VICTIMS]
    unchanged = sum(
        content == victim.record for content, victim in zip(made, VICTIMS * 20, strict=True)
    )
    assert unchanged < 90, "a mutation that changes nothing tests nothing"


class Liar(Tier):
    """A tier that says `HIT` to everything and fills buffers with what it likes."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.deleted = answers, []

    def _get(self, keys, buffers, timeout_s, answers):
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            content = self.answers[key][: len(buffer)]
            buffer[: len(content)] = content
            answers.settle(index, HIT)

    def _put(self, keys, records, timeout_s, done):
        raise AssertionError

    def _contains(self, keys, timeout_s):
        return [True] * len(keys)

    def _delete(self, keys, timeout_s):
        self.deleted += keys

    def scan(self):
        yield from (ListedRecord(key, len(content)) for key, content in self.answers.items())

    def _size(self):
        return len(self.answers), 0, -1


class LiarAtOnce(Liar):
    """Says so of each key, once before it fills buffers and once after."""

    def _get(self, keys, buffers, timeout_s, answers):
        for index in range(len(keys)):
            answers.settle(index, HIT)
        super()._get(keys, buffers, timeout_s, answers)


class LiarTwice(Liar):
    """Says so of each key, and then again, with other bytes in the buffers."""

    def _get(self, keys, buffers, timeout_s, answers):
        for index, buffer in enumerate(buffers):
            buffer[:] = VICTIMS[index].record
            answers.settle(index, HIT)
        super()._get(keys, buffers, timeout_s, answers)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [Liar, LiarAtOnce, LiarTwice])
@given(chance=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_tier_can_make_get_return_wrong_bytes(kind, chance):
    changed = {victim.key: mutated(chance, victim)[1] for victim in VICTIMS}
    liar, keys = kind(changed), list(changed)
    buffers = [new_buffer(len(victim.record)) for victim in VICTIMS]
    outcomes = liar.get(keys, buffers)
    for victim, outcome, buffer in zip(VICTIMS, outcomes, buffers, strict=True):
        assert outcome is not HIT or victim.may_be_read(buffer) or not victim.reads(buffer)
    dropped = [key for key, each in zip(keys, outcomes, strict=True) if each is Outcome.CORRUPT]
    assert liar.deleted == dropped, "a corrupt record is dropped, a foreign one is left alone"


def put_all(tier, victims):
    buffers = [new_buffer(len(victim.record)) for victim in victims]
    for victim, buffer in zip(victims, buffers, strict=True):
        buffer[:] = victim.record
    assert set(tier.put([victim.key for victim in victims], buffers, 10)) == {STORED}
    return buffers


def read_all(tier, victims):
    buffers = [new_buffer(len(victim.record)) for victim in victims]
    outcomes = tier.get([victim.key for victim in victims], buffers, 10)
    for victim, outcome, buffer in zip(victims, outcomes, buffers, strict=True):
        if outcome is HIT:
            assert victim.may_be_read(buffer) or not victim.reads(buffer)
        else:
            assert outcome in {ABSENT, *REFUSED}
    return outcomes


def check_after_changes(tier, victims):
    """Nothing wrong is read, what was corrupt is gone, and storing it again heals it."""
    outcomes = read_all(tier, victims)
    assert Outcome.CORRUPT in outcomes
    corrupt = [v for v, each in zip(victims, outcomes, strict=True) if each is Outcome.CORRUPT]
    assert set(read_all(tier, corrupt)) == {ABSENT}
    put_all(tier, corrupt)
    assert set(read_all(tier, corrupt)) == {HIT}
    tier.check()


def change_files(chance, folder, victims):
    by_key = {victim.key: victim for victim in victims}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("r+b") as file:
                for key, at in list(records_in(path.read_bytes())):
                    if key in by_key:
                        file.seek(at)
                        file.write(mutated(chance, by_key[key])[1])


def make_victims(seed, count=150):
    chance = random.Random(seed)
    return [make_victim(chance, number) for number in range(count)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(3))
def test_a_host_arena_that_changes_gives_misses(seed):
    victims, chance = make_victims(seed), random.Random(seed)
    with Host("64MiB") as host:
        put_all(host, victims)
        by_key = {victim.key: victim for victim in victims}
        memory = host._arena.memory.data
        for key, at in list(records_in(bytes(memory))):
            content = mutated(chance, by_key[key])[1] if key in by_key else b""
            memory[at : at + len(content)] = content
        check_after_changes(host, victims)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", [Files, partial(Disk, capacity="64MiB")], ids=["files", "slabs"])
@pytest.mark.parametrize("seed", range(3))
def test_files_that_change_give_misses(tmp_path, kind, seed):
    victims = make_victims(seed)
    with kind(tmp_path) as tier:
        put_all(tier, victims)
        change_files(random.Random(seed), tmp_path, victims)
        check_after_changes(tier, victims)


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(10))
def test_a_disk_tier_whose_files_were_damaged_or_replaced_returns_nothing_wrong(tmp_path, seed):
    victims, chance = make_victims(seed, 60), random.Random(seed)
    with Disk(tmp_path / "now", "8MiB") as disk:
        put_all(disk, victims[:30])
    shutil.copytree(tmp_path / "now", tmp_path / "earlier")
    with Disk(tmp_path / "stranger", "8MiB") as disk:
        put_all(disk, make_victims(seed + 100, 90)[60:])
    with Disk(tmp_path / "now", "8MiB") as disk:
        disk.delete([victim.key for victim in victims[:10]])
        put_all(disk, victims[30:])
    damaged(chance, tmp_path / "now", [tmp_path / "earlier", tmp_path / "stranger"])
    with contextlib.suppress(TierError), Disk(tmp_path / "now", "8MiB") as disk:
        read_all(disk, victims)
        disk.put([v.key for v in victims], [memoryview(v.record) for v in victims], 10)
        read_all(disk, victims)
        disk.check()


def test_the_header_of_a_record_is_where_a_search_finds_it():
    record = make_record(random.Random(0), VICTIMS[0].key, 100, 1)
    assert list(records_in(bytes(64) + record)) == [(VICTIMS[0].key, 64)]
    assert len(record) >= HEADER_BYTES
