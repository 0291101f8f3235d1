"""A tier that is down when it is opened: left alone, said once, and used when it is there."""

import logging
import time

import pytest
from dict_tier import DictTier
from stack_help import KEYS, RECORDS, SIZE

from quire.engines.tiered.opening import open_stack
from quire.errors import ConfigError, TierBusy, TierError
from quire.tiers import opening, wrapped
from quire.tiers.contract import TierContract
from quire.tiers.disk import Disk
from quire.tiers.stack.stack import TierStack
from quire.tiers.wrapped import Late

DOWN = "redis://127.0.0.1:1"


class TestLateTierThatIsThere(TierContract):
    """Once it could be opened it is the tier within."""

    @pytest.fixture
    def make_tier(self, monkeypatch):
        monkeypatch.setattr(wrapped, "RETRY_S", 0.0)
        return lambda capacity=None: Late("dict", DictTier, TierError("down"))

    def tamper(self, tier, key, record):
        tier.tier.records[key] = record


@pytest.fixture
def server(monkeypatch):
    """A tier that cannot be opened while it is down."""

    class Server:
        is_down = True
        num_tried = 0
        within = DictTier("far")

        def open(self, spec):
            self.num_tried += 1
            if self.is_down:
                raise TierError("connection refused")
            self.within.in_memory = False
            return self.within

    server = Server()
    open_tier = opening.open_tier
    monkeypatch.setattr(
        opening, "open_tier", lambda spec: server.open(spec) if spec == "far:" else open_tier(spec)
    )
    return server


def test_a_tier_down_at_start_is_left_alone_with_one_warning(server, caplog):
    caplog.set_level(logging.INFO, "quire")
    with open_stack(["host:1MiB", "far:"]) as stack:
        assert stack.find(KEYS[:2]) == [-1, -1]
        for _ in range(20):
            stack.store(KEYS[:2], RECORDS[:2])
        assert stack.find(KEYS[:2]) == [0, 0]
        assert [each.reading for each in stack.stats().tiers] == ["closed", "open"]
        stack.check()
    assert server.num_tried == 1
    (warning,) = (each.getMessage() for each in caplog.records if each.name.startswith("quire"))
    assert "far" in warning
    assert "connection refused" in warning


def test_a_tier_down_at_start_is_used_once_it_answers(server, monkeypatch):
    monkeypatch.setattr(wrapped, "RETRY_S", 0.0)
    with open_stack(["far:"], {"cool_down_s": 0.01}) as stack:
        server.is_down = False
        for _ in range(500):
            stack.find(KEYS[:1])
            stack.store(KEYS[:1], RECORDS[:1])
            stack.drain(1.0)
            if server.within.records:
                break
            time.sleep(0.01)
        assert stack.find(KEYS[:1]) == [0]
        assert stack.load(KEYS[:1], [SIZE]) == (["hit"], RECORDS[:1])
        assert stack.stats().tiers[0].tier.num_records == 1
    assert server.within.is_closed


def test_calls_of_it_fail_until_then_and_try_it_once_in_a_while(server):
    (late,) = opening.open_tiers(["far:"])
    for _ in range(5):
        assert late.lookup(KEYS[:1]) == ([False], ["error"])
        assert late.get(KEYS[:1], [memoryview(bytearray(SIZE))]) == ["error"]
        assert late.put(KEYS[:1], RECORDS[:1]) == ["error"]
    assert late.stats().num_records == 0
    assert server.num_tried == 1
    late.close()


def test_a_tier_closed_while_it_opens_is_closed_afterwards(tmp_path):
    def open_slowly():
        late.close()
        return Disk(tmp_path, "8MiB")

    late = Late("disk", open_slowly, TierError("down"))
    late._tried_at -= wrapped.RETRY_S
    assert late.lookup(KEYS[:1]) == ([False], ["error"])
    Disk(tmp_path, "8MiB").close()


def test_strict_raises_and_leaves_nothing_open(tmp_path):
    lines = [f"disk:{tmp_path}?capacity=8MiB", DOWN]
    pytest.importorskip("redis")
    with pytest.raises(TierError):
        open_stack(lines, {"strict": True})
    with open_stack(lines) as stack:
        assert len(stack.tiers) == 2
    Disk(tmp_path, "8MiB").close()


def test_misspelt_tiers_and_busy_directories_are_errors_at_start(tmp_path):
    with pytest.raises(ConfigError):
        open_stack(["hots:1GiB"])
    with Disk(tmp_path, "8MiB"), pytest.raises(TierBusy):
        open_stack([f"disk:{tmp_path}?capacity=8MiB"])


def test_a_stack_of_a_late_tier_only_answers_at_once(server):
    with TierStack(opening.open_tiers(["far:"])) as stack:
        assert stack.find(KEYS[:1]) == [-1]
        assert stack.store(KEYS[:1], RECORDS[:1]) == ["skipped"]
