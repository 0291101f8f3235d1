"""A call of the Mooncake tier that is cut off anywhere, as by Ctrl-C, keeps no caller from the next call."""

import time

import pytest
from cut_tiers import CALLS, HELD, LONG, SAMPLES, KeptCut, assert_fit, close, places_of
from mooncake_server import MooncakeServer

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import records_of
from quire.tiers.mooncake import Mooncake
from quire.tiers.mooncake.calls import Callers

NAMES = [name for name in CALLS if name not in ("touch", "scan")]


class ManyTiers:
    """Tiers of one caller each over one store: a caller that stays taken keeps everybody waiting."""

    def __init__(self, store):
        self.store, self.count = store, 0

    def prepared(self):
        self.count += 1
        tier = Mooncake(store=self.store, prefix=f"cut{self.count}:", callers=1, buffer="1MiB")
        assert tier.put(HELD, records_of(HELD), 5.0) == [Outcome.STORED] * len(HELD)
        return tier


@pytest.fixture(scope="module")
def tiers(tmp_path_factory):
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake") / "log")
    with Mooncake(server.address) as tier:
        yield ManyTiers(tier._store)
    server.kill()


@pytest.mark.system("mooncake")
@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*NAMES, "close"])
def test_a_mooncake_tier_answers_in_time_after_a_call_that_was_cut_off(tiers, name, samples):
    call = CALLS.get(name, lambda tier: tier.close())
    with tiers.prepared() as tier:
        places = places_of(lambda: call(tier), samples, name)
    for at in places:
        tier, cut = tiers.prepared(), KeptCut(at)
        cut.run(lambda tier=tier: call(tier))
        if name != "close":
            assert_fit(tier, at)
        close(tier)
        assert tier._callers._has_ended


@pytest.mark.parametrize("samples", [12, pytest.param(LONG, marks=pytest.mark.long)])
def test_a_caller_is_free_after_a_call_that_was_cut_off(samples):
    def called(callers, job):
        return callers.use(5.0, lambda caller: caller.call(job))

    def closed(callers):
        callers.close(lambda _: True, time.monotonic() + 5.0)

    whole = Callers(1, lambda address, size: 0)
    places = places_of(lambda: called(whole, lambda: 1), samples, "callers")
    closed(whole)
    for at in places:
        callers, cut, done = Callers(1, lambda address, size: 0), KeptCut(at), []
        cut.run(lambda callers=callers, done=done: called(callers, lambda: done.append(1)))
        assert called(callers, lambda: 2) == 2
        assert len(done) <= 1
        closed(callers)
        assert callers._has_ended
