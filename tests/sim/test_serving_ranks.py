"""Data-parallel ranks: a queue and blocks each, and steps that end for all at once."""

import msgspec
import numpy as np
import pytest
from serving_help import LinearTiming, limits, random_requests, request, run

from quire.errors import ConfigError
from quire.routing import LeastLoaded
from quire_sim.hardware import MemoryTier
from quire_sim.serving import Cluster, Load
from quire_sim.serving.ranks import Ranks
from quire_sim.serving.simulate import Simulation


class RankTiming(LinearTiming):
    """Ranks wait for the one that comes last."""

    def ranks_s(self, ranks, num_steps):
        growing = np.arange(num_steps)
        return np.max(
            [
                self.step_s(chunks, contexts) + len(contexts) * growing * 1e-8
                for chunks, contexts in ranks
            ],
            axis=0,
        )


def ranks(requests, num_ranks=2, **changes):
    return run(requests, timing=RankTiming(), num_ranks=num_ranks, limits=limits(**changes))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_one_rank_serves_as_a_replica_without_ranks(seed, ahead):
    requests = random_requests(seed, 60)
    bounds = limits(60, plans_ahead=ahead)
    _, alone = run(requests, limits=bounds)
    served = []
    simulation = Simulation(
        Cluster(bounds, RankTiming()), Load(requests), LeastLoaded(), [served.append]
    )
    simulation.replicas = [Ranks(0, bounds, RankTiming(), 1)]
    simulation.run(requests)
    served.sort(key=lambda each: each.number)
    for one, other in zip(served, alone, strict=True):
        for name in ("queued_s", "admitted_s", "first_token_s", "finished_s"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12)
        assert (one.cached_tokens, one.preemptions) == (other.cached_tokens, other.preemptions)


@pytest.mark.parametrize("seed", range(4))
def test_every_request_of_ranks_ends_once_and_none_is_early(seed):
    requests = random_requests(seed, 80)
    result, served = ranks(requests, 3, num_blocks=60, plans_ahead=seed % 2)
    assert [each.number for each in served] == list(range(80))
    assert result.num_replicas == 1
    assert all(utilised <= 1 for utilised in result.utilisation)
    for each in served:
        assert each.arrived_s <= each.queued_s <= each.admitted_s <= each.first_token_s
        assert each.first_token_s <= each.finished_s


def test_a_step_of_one_rank_lasts_as_long_as_that_of_the_other():
    short, long = request(1, 0.0, prompt=16, output=3), request(2, 0.0, prompt=256, output=3)
    _, (alone,) = ranks([short])
    _, (beside, other) = ranks([short, long])
    assert beside.first_token_s == other.first_token_s > alone.first_token_s


def test_a_request_waits_for_the_rank_that_it_was_given_to():
    """Two ranks with one seat each: the third request waits, though a pool of both would have room."""
    rows = [request(row, 0.0, prompt=32, output=20) for row in (1, 2, 3)]
    _, served = ranks(rows, max_sequences=1)
    assert served[0].admitted_s == served[1].admitted_s == 0
    assert served[2].admitted_s >= min(served[0].finished_s, served[1].finished_s)
    _, one = run(rows, limits=limits(max_sequences=2))
    assert one[2].admitted_s > 0


def test_ranks_do_not_find_blocks_of_each_other():
    ids = np.arange(8)
    rows = [request(row, 0.0, prompt=128, output=4, ids=ids) for row in (1, 2)]
    rows.append(request(3, 0.05, prompt=128, output=4, ids=ids))
    _, served = ranks(rows)
    assert [each.cached_tokens for each in served] == [0, 0, 127]


def test_ranks_with_tiers_or_another_scheduler_are_refused():
    bounds = limits()
    for settings in (
        {"tiers": (MemoryTier("host", 1 << 30, 1e9),), "block_bytes": 4096},
        {"scheduler": "quire"},
    ):
        with pytest.raises(ConfigError, match="2 ranks step together"):
            Cluster(bounds, RankTiming(), num_ranks=2, **settings)
    with pytest.raises(ConfigError, match="num_ranks"):
        Cluster(bounds, RankTiming(), num_ranks=0)
    assert msgspec.structs.replace(Cluster(bounds, RankTiming()), num_ranks=2).num_ranks == 2
