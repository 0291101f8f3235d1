"""Requirements of every tier that purges a tenant; a part of `TierContract`."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.tiers.base import Outcome, Tier
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.purging import Purged

MINE, OTHER = b"tenant-1", b"tenant-2"


class PurgeContract:
    """Holds for every tier: a purge leaves nothing of its tenant, and all of others'."""

    purges_old_versions: bool = True
    """Whether a purge can be complete; False: of a store whose old versions quire cannot see."""

    def search(self, tier: Tier, needle: bytes) -> list[str]:
        """Return every place where bytes are found in what the tier stands on: files, memory, a server's dump."""
        return [each.key.hex() for each in tier.scan() if needle in each.key]

    def test_a_purge_leaves_nothing_of_its_tenant_and_all_of_others(self, tier: Tier) -> None:
        mine, others = names_of(range(30), MINE), names_of(range(30), OTHER)
        everybodys = names_of(range(5))
        sizes = (1000, 5000)
        records = {
            key: record
            for keys in (mine, others, everybodys)
            for at in (0, 1)
            for key, record in zip(keys[at::2], records_of(keys[at::2], sizes[at]), strict=True)
        }
        keys = [key for pair in zip(mine, others, strict=True) for key in pair] + everybodys
        tier.put(keys, [records[key] for key in keys], timeout_s=10)
        tier.delete(mine[:5], timeout_s=10)
        told = tier.purge(MINE, 30)
        assert told.is_complete is self.purges_old_versions, told.reason
        assert told.count == 25
        assert told.num_bytes == 0 or told.num_bytes >= sum(len(records[key]) for key in mine[5:])
        buffers = buffers_like([records[key] for key in keys])
        outcomes = dict(zip(keys, tier.get(keys, buffers, timeout_s=10), strict=True))
        assert {outcomes[key] for key in mine} == {Outcome.ABSENT}
        assert {outcomes[key] for key in (*others, *everybodys)} == {Outcome.HIT}
        needles = [MINE, *(bytes(records[key][600:632]) for key in mine)]
        assert [where for needle in needles for where in self.search(tier, needle)] == []
        assert self.search(tier, OTHER), "the search finds what is there"

    def test_a_purge_of_nothing_is_complete(self, tier: Tier) -> None:
        others = names_of(range(3), OTHER)
        tier.put(others, records_of(others), timeout_s=10)
        told = tier.purge(MINE, 30)
        assert (told.count, told.num_bytes) == (0, 0)
        assert tier.contains(others, timeout_s=10) == [True] * 3

    def test_what_is_put_behind_a_purge_is_there(self, tier: Tier) -> None:
        mine = names_of(range(3), MINE)
        tier.put(mine, records_of(mine), timeout_s=10)
        tier.purge(MINE, 30)
        assert tier.put(mine, records_of(mine), timeout_s=10) == [Outcome.STORED] * 3
        assert tier.contains(mine, timeout_s=10) == [True] * 3
        assert tier.purge(MINE, 30).count == 3

    @pytest.mark.parametrize("tag", [b"", b"short", b"too-long-", "tenant-1", None])
    def test_a_tag_that_is_none_is_refused(self, tier: Tier, tag: object) -> None:
        with pytest.raises(ConfigError, match="tenant tag"):
            tier.purge(tag)  # type: ignore[arg-type]

    def test_a_put_that_began_before_a_purge_leaves_nothing(self, tier: Tier) -> None:
        (mine, later), (other,) = names_of(range(2), MINE), names_of(range(1), OTHER)
        has_begun, may_go_on = threading.Event(), threading.Event()
        put = tier._put  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

        def held_up(keys: Any, *given: Any) -> None:
            if mine in keys:
                has_begun.set()
                assert may_go_on.wait(10)
            put(keys, *given)

        tier._put = held_up  # type: ignore[method-assign]  # noqa: SLF001
        told: list[Purged] = []
        keys = [mine, other]
        writer = threading.Thread(target=tier.put, args=(keys, records_of(keys), 10))
        writer.start()
        assert has_begun.wait(10)
        purger = threading.Thread(target=lambda: told.append(tier.purge(MINE, 30)))
        purger.start()
        while not tier.writes.is_barred(MINE):
            time.sleep(0.001)
        assert tier.put([later], records_of([later]), 10) == [Outcome.SKIPPED]
        may_go_on.set()
        writer.join()
        purger.join()
        assert told[0].is_complete is self.purges_old_versions
        assert tier.contains([mine, later, other], timeout_s=10) == [False, False, True]

    def test_a_put_that_hangs_through_a_purge_leaves_nothing_when_it_ends(self, tier: Tier) -> None:
        (mine,), (other,) = names_of(range(1), MINE), names_of(range(1), OTHER)
        has_begun, may_go_on = threading.Event(), threading.Event()
        put = tier._put  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

        def held_up(*given: Any) -> None:
            put(*given)
            has_begun.set()
            assert may_go_on.wait(10)

        tier.put([other], records_of([other]), 10)
        tier._put = held_up  # type: ignore[method-assign]  # noqa: SLF001
        writer = threading.Thread(target=tier.put, args=([mine], records_of([mine]), 10))
        writer.start()
        assert has_begun.wait(10)
        told = tier.purge(MINE, 0.2)
        assert not told.is_complete
        assert told.reason
        may_go_on.set()
        writer.join()
        assert tier.contains([mine, other], timeout_s=10) == [False, True]
