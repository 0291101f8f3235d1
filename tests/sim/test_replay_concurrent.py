"""Replays whose requests overlap."""

import msgspec
import pytest
from replay_help import BLOCK, random_chains, trace_of

from quire.errors import ConfigError
from quire_sim.concurrent import AsRecorded, OnRoofline, Rates, replay_concurrent
from quire_sim.foresight import KINDS
from quire_sim.hardware import Roofline, accelerator_named, model_named
from quire_sim.replay import replay


class Fixed(msgspec.Struct, frozen=True):
    """Every request computes and generates for as long."""

    prefill_s: float = 0.0
    decode_s: float = 0.0

    def times(self, request, cached_tokens):
        return self.prefill_s, self.decode_s


def started(trace, capacity, service):
    """The row and the tokens found of each request, in the order of their starts, and the result."""
    starts = []
    result = replay_concurrent(
        trace, capacity, service=service, observers=[lambda r, hit: starts.append((r.row, hit))]
    )
    return starts, result


@pytest.mark.cases(7)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [2, 20])
def test_requests_that_take_no_time_are_a_replay_one_by_one(seed, kind, capacity):
    trace = trace_of(random_chains(seed))
    serial = replay(trace, capacity, hints=kind)
    overlapping = replay_concurrent(trace, capacity, service=Fixed(), hints=kind)
    assert msgspec.structs.replace(overlapping, measured={}, seconds=serial.seconds) == serial


def test_blocks_that_are_being_computed_are_not_found():
    trace = trace_of([[1, 2], [1, 2, 3], [1, 2, 3]], time_s=[0.0, 1.0, 2.5])
    starts, result = started(trace, 100, Fixed(prefill_s=2.0))
    assert starts == [(1, 0), (2, 0), (3, 2 * BLOCK)]
    assert result.missed["computing"] == 3 * BLOCK
    assert result.missed["evicted"] == 0


def test_two_that_compute_the_same_keep_it_once():
    trace = trace_of([[1, 2], [1, 2], [1, 2]], time_s=[0.0, 0.0, 9.0])
    starts, result = started(trace, 5, Fixed(1.0, 1.0))
    assert [hit for _, hit in starts] == [0, 0, 2 * BLOCK]
    assert result.evicted_blocks == 0


def test_a_request_without_room_waits_and_those_behind_it_too():
    trace = trace_of([[1, 1], [2, 2, 2], [3]], time_s=[0.0, 1.0, 2.0])
    starts, result = started(trace, 4, Fixed(decode_s=5.0))
    assert [row for row, _ in starts] == [1, 2, 3]
    waits = (0.0, 4.0, 8.0)
    assert result.measured["mean_wait_s"] == pytest.approx(sum(waits) / 3)
    assert result.measured["max_wait_s"] == 8.0
    assert result.measured["num_waited"] == 2


def test_shared_blocks_in_use_take_no_room_twice():
    chains = [[1, 1, 1], [1, 1, 1], [2, 2, 2]]
    trace = trace_of(chains, time_s=[0.0, 1.0, 2.0])
    _, result = started(trace, 4, Fixed(decode_s=5.0))
    assert result.measured["peak_in_flight"] == 2
    assert result.measured["peak_active_blocks"] == 5
    assert result.measured["num_waited"] == 1


def test_output_takes_blocks_while_the_request_is_in_flight():
    trace = trace_of([[1], [2]], output_tokens=[3 * BLOCK, 0], time_s=[0.0, 1.0])
    _, result = started(trace, 5, Fixed(decode_s=9.0))
    assert result.measured["peak_active_blocks"] == 5
    assert result.measured["num_waited"] == 1
    assert started(trace, 6, Fixed(decode_s=9.0))[1].measured["num_waited"] == 0


def test_a_request_larger_than_the_cache_runs_alone():
    trace = trace_of([[1] * 9, [2]], output_tokens=[1000, 0], time_s=[0.0, 1.0])
    starts, result = started(trace, 3, Fixed(decode_s=4.0))
    assert [row for row, _ in starts] == [1, 2]
    assert result.measured["max_wait_s"] == 3.0


def test_events_of_one_time_have_one_order():
    trace = trace_of([[1, 1], [1, 1], [2, 2]], time_s=[0.0, 2.0, 2.0])
    starts, result = started(trace, 2, Fixed(1.0, 1.0))
    assert starts == [(1, 0), (2, 2 * BLOCK), (3, 0)]
    assert result.measured["max_wait_s"] == 2.0


def test_a_request_that_starts_when_another_ends_finds_its_blocks():
    trace = trace_of([[1, 1], [2, 2], [2, 2]], time_s=[0.0, 1.0, 1.5])
    starts, result = started(trace, 5, Fixed(1.0, 1.0))
    assert starts == [(1, 0), (2, 0), (3, 2 * BLOCK)]
    assert result.measured["max_wait_s"] == 0.5


@pytest.mark.cases(4)
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_found_or_missed_for_one_reason(policy, seed):
    chains = random_chains(seed, num_requests=100)
    trace = trace_of(chains, output_tokens=[number % 7 for number in range(100)])
    result = replay_concurrent(trace, 12, policy, service=Fixed(1.3, 2.1))
    assert result.num_requests == 100
    assert result.hit_tokens + sum(result.missed.values()) == result.prompt_tokens
    assert min(result.missed.values()) >= 0
    assert result.measured["peak_active_blocks"] <= 13
    again = replay_concurrent(trace, 12, policy, service=Fixed(1.3, 2.1))
    assert msgspec.structs.replace(again, seconds=result.seconds) == result


# -- how long requests take ----------------------------------------------------------------


@pytest.fixture
def request_of():
    def make(**columns):
        values = {name: [value] for name, value in columns.items()}
        return trace_of([[1] * 200], block_size=16, **values).requests[0]

    return make


def test_rates_are_tokens_per_second_of_what_is_not_cached(request_of):
    request = request_of(output_tokens=100)
    assert Rates(1000, 50).times(request, 1201) == (2.0, 2.0)


def test_a_roofline_computes_less_after_a_longer_hit(request_of):
    service = OnRoofline(Roofline(model_named("llama-3.1-8b"), accelerator_named("h100")))
    request = request_of(output_tokens=100)
    cold, hit = service.times(request, 0), service.times(request, 3000)
    assert cold[0] > hit[0] > 0
    assert cold[1] == hit[1] > 0
    assert service.times(request, request.prompt_tokens)[0] > 0


def test_recorded_durations_are_kept_and_shared_out(request_of):
    request = request_of(output_tokens=100, duration_s=8.0)
    service = AsRecorded(Rates(1000, 50))
    prefill_s, decode_s = service.times(request, 1201)
    assert (prefill_s, decode_s) == (4.0, 4.0)
    assert service.times(request_of(output_tokens=100), 1201) == (2.0, 2.0)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_an_invalid_rate_is_refused(rate):
    with pytest.raises(
        ConfigError, match="the decode rate in tokens per second is a number above 0"
    ):
        Rates(decode=rate)
