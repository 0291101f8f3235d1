"""`Faulty`: each fault does what it says, and the tier around it turns it into a counted miss."""

import time
from contextlib import contextmanager

import pytest
from dict_tier import DictTier

from quire.errors import ConfigError
from quire.tiers.base import Outcome
from quire.tiers.contract import TierContract
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.faults import FaultPlan, Faulty

KEYS = names_of(range(200))
RECORDS = records_of(KEYS, 100)


class TestFaulty(TierContract):
    """Without faults it is the tier within; with the plans for a stalled and a broken one, those."""

    @pytest.fixture
    def make_tier(self):
        return lambda capacity=None: Faulty(DictTier())

    def tamper(self, tier, key, record):
        tier.tier.records[key] = record

    @contextmanager
    def stalled(self, tier):
        tier.plan = FaultPlan(latency_s=1e9)
        yield
        tier.plan = FaultPlan()

    @contextmanager
    def broken(self, tier):
        tier.plan = FaultPlan(errors=1.0)
        yield
        tier.plan = FaultPlan()


def faulty(sleep=time.sleep, seed=1, **plan):
    tier = Faulty(DictTier(), FaultPlan(), seed, sleep=sleep)
    tier.put(KEYS, RECORDS)
    tier.plan = FaultPlan(**plan)
    return tier


def read(tier, timeout_s=1.0):
    buffers = buffers_like(RECORDS)
    outcomes = tier.get(KEYS, buffers, timeout_s)
    for outcome, buffer, record in zip(outcomes, buffers, RECORDS, strict=True):
        assert outcome is not Outcome.HIT or buffer == record
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("fault", ["corruption", "short_reads"])
def test_records_that_are_read_wrong_are_found_out_and_dropped(fault):
    tier = faulty(**{fault: 0.2})
    outcomes = read(tier)
    met = tier.met[fault]
    assert 20 <= met <= 60
    # A read that ends in the padding, or bits that turn back, leave a record as it was.
    assert met - 5 <= outcomes.count("corrupt") <= met
    assert outcomes.count("hit") == 200 - outcomes.count("corrupt")
    tier.plan = FaultPlan()
    assert read(tier).count("absent") == outcomes.count("corrupt")


def test_a_lost_record_was_acknowledged():
    tier = Faulty(DictTier(), FaultPlan(losses=0.5), 2)
    assert tier.put(KEYS, RECORDS) == [Outcome.STORED] * 200
    assert read(tier).count("absent") == tier.met["losses"] > 50


def test_a_full_tier_says_so():
    tier = Faulty(DictTier(), FaultPlan(full=1.0))
    assert tier.put(KEYS, RECORDS) == [Outcome.FULL] * 200
    assert tier.put(KEYS[:1] * 2, RECORDS[:1] * 2) == [Outcome.FULL] * 2


def test_a_failing_call_is_an_error_and_no_exception():
    tier = faulty(errors=1.0)
    assert read(tier) == ["error"] * 200
    assert tier.put(KEYS, RECORDS) == [Outcome.ERROR] * 200
    assert tier.lookup(KEYS) == ([False] * 200, [Outcome.ERROR])


def test_latency_beyond_the_timeout_is_a_timeout_in_time():
    slept = []
    tier = faulty(latency_s=1e6, sleep=slept.append)
    assert read(tier, timeout_s=0.5) == ["timeout"] * 200
    assert slept == [0.5]


def test_a_faulty_tier_keeps_to_its_bandwidth():
    slept = []
    tier = faulty(bandwidth=1e6, sleep=slept.append)
    assert read(tier) == ["hit"] * 200
    assert sum(slept) == pytest.approx(sum(map(len, RECORDS)) / 1e6)


def test_a_hang_ignores_the_timeout_and_then_does_its_work():
    slept = []
    tier = faulty(hangs=1.0, hang_s=77.0, sleep=slept.append)
    assert read(tier, timeout_s=0.1) == ["hit"] * 200
    assert slept == [77.0]


def test_false_hits_are_lookups_only():
    tier = Faulty(DictTier(), FaultPlan(false_hits=1.0))
    assert tier.contains(KEYS) == [True] * 200
    assert read(tier) == ["absent"] * 200


def test_a_crash_tears_the_record_that_is_written_and_ends_service_until_revived():
    tier = Faulty(DictTier(), FaultPlan(crash_at=51))
    outcomes = tier.put(KEYS, RECORDS)
    assert outcomes == [Outcome.STORED] * 50 + [Outcome.ERROR] * 150
    assert read(tier) == ["error"] * 200
    tier.plan = FaultPlan()
    tier.revive()
    assert read(tier) == ["hit"] * 50 + ["corrupt"] + ["absent"] * 149
    assert tier.put(KEYS[50:51], RECORDS[50:51]) == [Outcome.STORED]
    assert read(tier)[:51] == ["hit"] * 51


def test_the_same_seed_meets_the_same_faults():
    plan = {"corruption": 0.1, "short_reads": 0.1}
    assert read(faulty(seed=5, **plan)) == read(faulty(seed=5, **plan))
    assert read(faulty(seed=5, **plan)) != read(faulty(seed=6, **plan))


def test_a_wrapper_reports_the_victims_of_its_tier():
    told = []
    tier = Faulty(DictTier(capacity=1))
    tier.evicting = lambda keys, records: told.append((keys, bytes(records[0])))
    tier.put(KEYS[:2], RECORDS[:2])
    assert told == [(KEYS[:1], bytes(RECORDS[0]))]


@pytest.mark.parametrize("wrong", [{"errors": 1.5}, {"hangs": -0.1}, {"latency_s": -1.0}])
def test_a_plan_with_numbers_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FaultPlan(**wrong)
