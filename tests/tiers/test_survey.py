"""The contents of a tier, by namespace, scope and prefix, and how hot they are."""

from dict_tier import DictTier
from prefixes_help import FULL, STATES, book_of, hashes_of, store

from quire import Scope
from quire.exchange.hashing import root_digest
from quire.tiers.contents.names import ChainName, NameBook, NamespaceName
from quire.tiers.contents.survey import BUCKETS, survey
from quire.tiers.format import record_bytes

SYSTEM = list(range(24))
ONE, TWO = [*SYSTEM, *range(100, 116)], [*SYSTEM, *range(200, 208)]
OTHER = Scope(salt="b")
FULL_BYTES = record_bytes(256)


def filled():
    tier = DictTier()
    store(tier, FULL, dict.fromkeys(hashes_of(ONE) + hashes_of(TWO)))
    store(tier, FULL, hashes_of(SYSTEM, OTHER))
    store(tier, STATES, hashes_of(ONE)[-1:], group=1)
    return tier


def test_a_tree_of_runs_says_where_prefixes_part_and_what_lies_behind():
    book = book_of([FULL, STATES], [(ONE, None), (TWO, None), (SYSTEM, OTHER)])
    found = survey(filled(), book)
    mine, other = found.scopes
    assert mine.root == root_digest(Scope()).hex()
    shape = [
        (run.depth, run.start_token, run.stop_token, run.own.records, run.below.records)
        for run in mine.runs
    ]
    assert shape == [(0, 0, 24, 6, 13), (1, 24, 40, 5, 5), (1, 24, 32, 2, 2)]
    assert other.tally.records == 6
    assert other.label.startswith("scope ")
    assert found.unnamed.records == 0


def test_namespaces_are_counted_by_their_names():
    found = survey(filled(), book_of([FULL, STATES], [(ONE, None), (TWO, None), (SYSTEM, OTHER)]))
    full, states = found.namespaces
    assert (full.namespace, full.tally.records) == (FULL, 18)
    assert full.tally.num_bytes == 18 * FULL_BYTES
    assert (states.namespace, states.tally.records) == (STATES, 1)
    assert sum(found.record_sizes.values()) == found.total.records == 19


def test_without_names_headers_tell_namespaces_apart():
    found = survey(filled(), NameBook())
    assert [(row.fingerprint, row.tally.records, row.dtype) for row in found.namespaces] == [
        (FULL.digest.hex(), 18, "float16"),
        (STATES.digest.hex(), 1, "mixed"),
    ]
    assert found.unnamed.records == 19
    assert found.scopes == []


def test_records_beyond_those_read_are_counted_as_unread(monkeypatch):
    monkeypatch.setattr("quire.tiers.contents.survey.READ_RECORDS", 5)
    rows = {row.fingerprint: row.tally.records for row in survey(filled(), NameBook()).namespaces}
    assert rows[""] == 14
    assert sum(rows.values()) == 19


def test_the_most_recent_records_are_in_the_first_bucket():
    tier = DictTier()
    keys = store(tier, FULL, hashes_of(range(400)))
    tier.touch(keys[:10])
    book = book_of([FULL], [(range(400), None)])
    found = survey(tier, book)
    assert found.total.recency == [
        100 * FULL_BYTES // BUCKETS + (FULL_BYTES // 2) * (1 if bucket % 2 == 0 else -1)
        for bucket in range(BUCKETS)
    ]
    assert found.scopes[0].runs[0].own.recency == found.total.recency


def test_a_tier_that_knows_no_uses_has_no_buckets():
    tier = DictTier()
    store(tier, FULL, hashes_of(range(40)))
    entries = list(tier.scan())
    tier.scan = lambda: (type(entry)(entry.key, entry.num_bytes) for entry in entries)
    assert survey(tier, NameBook()).total.recency == []


def test_a_gap_in_what_is_stored_leaves_one_run():
    tier = DictTier()
    keys = store(tier, FULL, hashes_of(range(40)))
    tier.delete(keys[:5])
    found = survey(tier, book_of([FULL], [(range(40), None)]))
    (run,) = found.scopes[0].runs
    assert (run.start_token, run.stop_token, run.own.records) == (0, 40, 5)


def test_names_that_lead_in_a_circle_are_no_prefixes():
    blocks = hashes_of(range(12))
    tier = DictTier()
    store(tier, FULL, blocks)
    book = NameBook()
    book.add(NamespaceName(FULL))
    book.add(ChainName(blocks[2], blocks))
    found = survey(tier, book)
    assert found.scopes == []
    assert found.unnamed.records == 3
    assert found.namespaces[0].tally.records == 3


def test_an_empty_tier_is_nothing():
    found = survey(DictTier(), NameBook())
    assert (found.total.records, found.namespaces, found.scopes) == (0, [], [])


def test_ten_thousand_blocks_in_a_chain_of_branches_are_no_problem():
    book, parent = NameBook(), bytes(32)
    tier = DictTier()
    book.add(NamespaceName(FULL))
    for number in range(3000):
        one, two = (bytes([side]) * 28 + number.to_bytes(4) for side in (1, 2))
        book.add(ChainName(parent, [one]))
        book.add(ChainName(parent, [two]))
        parent = one
    store(tier, FULL, [one])
    found = survey(tier, book)
    assert found.scopes[0].runs[-1].depth == 2999
