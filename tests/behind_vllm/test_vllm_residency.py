"""Blocks that lie in tiers are told once when they come and once when they go; without vLLM."""

from sides_help import ALL, BLOCK, SmallEngine

from quire.engines.vllm.residency import Residencies, StoredRecord
from quire.tiers import Disk, Host

TEXT = [(7 * at) % 50 + 1 for at in range(30)]


def told_engine(tiers, **options):
    engine = SmallEngine(tiers, "hybrid", **options)
    engine.side.told = Residencies(engine.stack.tiers[-1])
    engine.side.describe = lambda request, at, group: ((request, at, group), (at, group))
    return engine


def taken(engine):
    engine.settle()
    return engine.side.told.take()


def test_blocks_of_each_group_are_told_once_they_are_stored(tmp_path):
    engine = told_engine([Host("1MiB"), Disk(tmp_path / "kv", "16MiB")])
    engine.run(TEXT, name="first")
    came, gone = taken(engine)
    assert sorted(came) == [
        ("first", at, group) for at in range(len(TEXT) // BLOCK) for group in (0, 1)
    ]
    assert gone == []
    engine.run(TEXT, name="again")
    engine.run([*TEXT[:24], *range(60, 90)], name="branch")
    came, gone = taken(engine)
    assert {(name, at) for name, at, _ in came} == {("branch", at) for at in range(6, 13)}
    assert gone == []
    engine.close()


def test_ends_are_told_of_blocks_that_the_slowest_tier_drops(tmp_path):
    engine = told_engine([Disk(tmp_path / "kv", "64KiB")], settings=ALL)
    held = set()
    for first in range(100, 160):
        engine.run([first, *TEXT[1:]], name=f"r{first}")
        came, gone = taken(engine)
        held |= {(at, group) for _, at, group in came}
        assert all(each in {(at, group) for at in range(8) for group in (0, 1)} for each in gone)
    engine.close()
    disk = Disk(tmp_path / "kv", "64KiB", read_only=True)
    told = engine.side.told
    assert len(told._held) == disk.stats().num_records
    disk.close()


def test_a_block_that_comes_and_goes_between_two_questions_is_told_twice():
    host = Host("1MiB")
    told = Residencies(host)
    told.stored(
        [StoredRecord(b"a" * 32, "a came", "a went"), StoredRecord(b"b" * 32, "b came", "b went")]
    )
    told.stored([StoredRecord(b"a" * 32, "a came", "a went")])
    assert host.evicting_of([b"a" * 32, b"c" * 32]) == []
    assert told.take() == (["a came", "b came"], ["a went"])
    told.stored([StoredRecord(b"a" * 32, "a came", "a went")])
    assert told.take() == (["a came"], [])
    host.close()


def test_a_tier_that_others_write_to_tells_no_ends(tmp_path):
    from quire.tiers import Files

    with Files(tmp_path) as files:
        told = Residencies(files)
        assert told.tells_ends is files.is_local
        assert (files.evicting is not None) is files.is_local
