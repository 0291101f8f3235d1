"""Tiers that fail, hang or lie, and those of another process: the tokens stay right."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hf_help import make_cache, random_ids, same, tiny_model

from quire import ops
from quire.engines.hf import PrefixCache
from quire.tiers.base import Outcome, Tier
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.host import Host
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack
from turns import by_turns

OPEN = StackSettings(gate=False)
sys.path.append(str(Path(__file__).parents[1] / "tiers"))


@pytest.fixture
def ids():
    return random_ids(torch.Generator().manual_seed(3), 90)


FAULTS = {
    "flipped bits": FaultPlan(corruption=0.5),
    "short reads": FaultPlan(short_reads=0.5),
    "losses": FaultPlan(losses=0.5),
    "full": FaultPlan(full=0.5),
    "errors": FaultPlan(errors=0.5),
    "false hits": FaultPlan(false_hits=0.5),
    "all": FaultPlan(corruption=0.2, errors=0.2, losses=0.2, full=0.2, false_hits=0.2),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("fault", "family"), by_turns(FAULTS, ["llama", "gemma3_text", "qwen3_next"])
)
def test_tiers_that_fail_are_misses_with_causes_and_the_tokens_stay_right(family, fault):
    model = tiny_model(family)
    faulty = Faulty(Host("64MiB"), FAULTS[fault], seed=3)
    settings = StackSettings(gate=False, failures=10**6)
    prompts = [random_ids(torch.Generator().manual_seed(seed), 60) for seed in range(3)]
    with TierStack([faulty], settings) as tiers:
        cache = make_cache(model, num_blocks=5, tiers=tiers)
        plain = {}
        for turn in range(2):
            for at, ids in enumerate(prompts):
                text = cache.generate(ids, max_new_tokens=4)
                if at not in plain:
                    plain[at] = model.generate(ids, max_new_tokens=4)
                assert torch.equal(text, plain[at]), turn
                ops.check(cache.manager)
        assert sum(faulty.met.values()), "the fault has happened"


def test_a_tier_that_hangs_costs_no_more_than_the_deadline(model, ids):
    faulty = Faulty(Host("64MiB"), FaultPlan(), seed=1)
    settings = StackSettings(
        gate=False, lookup_timeout_s=0.05, load_timeout_s=0.1, close_timeout_s=0.1
    )
    tiers = TierStack([faulty], settings)
    try:
        same(model, make_cache(model, tiers=tiers), ids)
        assert tiers.drain(20)
        faulty.plan = FaultPlan(hangs=1.0, hang_s=30.0)
        cache = make_cache(model, tiers=tiers)
        began = time.monotonic()
        cache.generate(ids, max_new_tokens=1)
        assert time.monotonic() - began < 10.0, "and what it computes itself"
        same(model, cache, ids)
    finally:
        tiers.close()


class Raising(Tier):
    """A tier with bugs: each call raises what no tier should."""

    name = "raising"

    def _get(self, keys, buffers, timeout_s, answers):
        raise KeyError("a bug")

    def _put(self, keys, records, timeout_s, done):
        raise RuntimeError("a bug")

    def _contains(self, keys, timeout_s):
        return [True] * len(keys)

    def _delete(self, keys, timeout_s):
        raise ValueError("a bug")

    def _size(self):
        return -1, -1, -1


def test_even_a_tier_with_bugs_fails_no_request(model, ids):
    with TierStack([Raising()], OPEN) as tiers:
        cache = make_cache(model, tiers=tiers)
        same(model, cache, ids)
        assert cache.last.tier_tokens == {}
        assert cache.last.tier_misses.get(Outcome.ERROR, 0) > 0


# -- another process -----------------------------------------------------------------------

WRITER = """
import sys
sys.path[:0] = [{here!r}]
import torch
from hf_help import make_cache, random_ids, tiny_model
ids = random_ids(torch.Generator().manual_seed(3), 90)
cache = make_cache(tiny_model("llama"), tiers=[{url!r}])
cache.generate(ids, max_new_tokens=8)
assert cache.tiers.drain(30)
cache.close()
"""


@pytest.mark.ci
@pytest.mark.system("redis-server")
def test_another_process_has_left_it_in_redis(model, ids, tmp_path):
    from servers import running

    with running(tmp_path) as server:
        code = WRITER.format(here=str(Path(__file__).parent), url=server.url)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
        with make_cache(model, tiers=[server.url]) as cache:
            same(model, cache, ids)
            assert cache.last.tier_tokens == {"redis": 80}
            with server.hanging():
                ops.clear(cache.manager)
                began = time.monotonic()
                same(model, cache, ids)
                assert time.monotonic() - began < 20, "no longer than the deadlines"
                assert cache.last.tier_tokens == {}
            server.stop()
            ops.clear(cache.manager)
            same(model, cache, ids)
            assert cache.last.tier_tokens == {}


def test_a_prefix_cache_without_tiers_asks_for_nothing_of_them(model):
    assert PrefixCache(model, "1MiB").tiers is None
