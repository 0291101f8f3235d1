"""A purge of an engine leaves no byte of its tenant anywhere, and others go on."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest
import torch
from loop_help import nothing_held, tiny_model, trained_model

from turns import by_turns

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

from searching import (
    found_in_bytes,
    found_in_files,
    found_in_memory,
    found_in_passes,
    found_in_pools,
)

from quire import Scope, ops
from quire.engines.loop import AsyncEngine, Engine, SamplingParams
from quire.errors import CacheBusy, RequestFailed, ScopeError
from quire.exchange.hashing import tenant_tag
from quire.tiers import Disk, Files, Host, TierKey
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

MINE, SALTED, OTHER = (
    Scope(tenant="acme"),
    Scope(salt="user-1", tenant="acme"),
    Scope(tenant="bolt"),
)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
ALWAYS = {"gate": False, "busy_share": 1.0}
BLOCK = 4


def prompt(first, num_tokens=41):
    """A prompt that shares no token with another at the same place."""
    return [3 + (first * 31 + at * 7) % 250 for at in range(num_tokens)]


class Needles:
    """Bytes of the last layer's K and V, as a tenant's cached blocks have them in the pools."""

    def __init__(self, engine):
        self._engine = engine
        self.found = {tenant_tag(MINE)}

    def take(self, *scopes):
        manager, (pool, *_) = self._engine.manager, self._engine._forward.pools
        for scope in scopes:
            root = manager.kernel.tree.roots.get(self._engine.scope(scope))
            nodes = [] if root is None else [*root.children.values()]
            for node in nodes:
                nodes.extend(node.children.values())
                for block in node.blocks[0]:
                    for held in (pool.k, pool.v):
                        self.found.add(held[-1, block, 1].contiguous().numpy().tobytes())

    def where(self, tmp_path, host):
        """Return the places in which some needle is."""
        forward = self._engine._forward
        where = found_in_pools(forward.pools, *self.found)
        where += found_in_passes(forward.model, *self.found)
        where += found_in_memory(host, *self.found) + found_in_files(tmp_path, *self.found)
        below = f"{tmp_path}/"
        return {each.partition(below)[2].split("/")[0] or each.split(":")[0] for each in where}


KEYS = [None, TierKey(b"k" * 32, tenants=b"t" * 32)]


@pytest.fixture(params=KEYS, ids=["open", "keyed"])
def tiers(tmp_path, request):
    made = [Host("1MiB"), Disk(tmp_path / "disk", "1MiB"), Files(tmp_path / "files")]
    with TierStack(made, StackSettings(key=request.param, **ALWAYS)) as stack:
        yield stack


def make(model, tiers, **options):
    options = {
        "num_blocks": 60,
        "block_size": BLOCK,
        "max_running": 6,
        "max_step_tokens": 64,
    } | options
    return Engine(model, tiers=tiers, **options)


def settled(engine):
    while not engine.is_settled:
        pass
    engine.tiers.drain(10)


@pytest.mark.cases(1)
def test_no_byte_of_a_tenant_is_left_in_pools_tiers_or_between_layers(tmp_path, tiers):
    engine = make(trained_model(), tiers)
    needles = Needles(engine)
    for number in range(7):  # more than the pools hold: blocks are evicted, and given to others
        scope = (MINE, OTHER, SALTED)[number % 3]
        engine.generate([prompt(number)], SHORT, scope=scope)
        needles.take(MINE, SALTED)
    settled(engine)
    pinned = ops.pin(engine.manager, prompt(6), engine.scope(MINE))
    assert pinned.num_tokens
    before = needles.where(tmp_path, tiers.tiers[0])
    assert {"pool 0.0", "pool 0.1", "passes", "arena", "disk", "files"} <= before
    told = engine.purge("acme")
    assert told.is_complete, told.reason
    assert (told.pins, told.requests, told.held) == (1, 0, 0)
    assert told.blocks["full"] > 0
    assert {name: each.count > 0 for name, each in told.tiers.items()} == {
        "host": True,
        "disk": True,
        "files": True,
    }
    assert needles.where(tmp_path, tiers.tiers[0]) == set()
    assert not pinned.is_held
    assert not any(scope.tenant == "acme" for scope in engine.manager.kernel.tree.roots)
    for number, scope in ((1, OTHER), (4, OTHER)):
        (output,) = engine.generate([prompt(number)], SHORT, scope=scope)
        assert output.num_cached_tokens == 40
    (output,) = engine.generate([prompt(0)], SHORT, scope=MINE)
    assert output.num_cached_tokens == 0
    (output,) = engine.generate([prompt(0)], SHORT, scope=MINE)
    assert output.num_cached_tokens == 40  # and the tenant may store again
    nothing_held(engine)
    engine.close()


def run(engine, num_steps):
    told = {}
    for _ in range(num_steps):
        told |= {output.request_id: output for output in engine.step()}
    return told


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("tiers", "num_blocks"), by_turns(KEYS, [60, 24]), indirect=["tiers"], ids=str
)
def test_requests_of_the_tenant_end_and_nothing_of_them_comes_back(tmp_path, tiers, num_blocks):
    """With few blocks some requests wait, and one was preempted."""
    engine = make(trained_model(), tiers, num_blocks=num_blocks, max_prefill_tokens=16)
    needles = Needles(engine)
    mine = [
        engine.add_request(
            prompt(at), SamplingParams(n=2, max_tokens=30, temperature=1.0), scope=each
        )
        for at, each in ((0, MINE), (1, SALTED))
    ]
    other = engine.add_request(
        prompt(2), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), scope=OTHER
    )
    alone = make(trained_model(), None)
    (expected,) = alone.generate(
        [prompt(2)], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    for _ in range(9):
        engine.step()
        needles.take(MINE, SALTED)
    mine += [engine.add_request(prompt(3), SHORT, scope=MINE)]
    assert len(needles.found) > 4
    told = engine.purge(Scope(tenant="acme", salt="another"))
    assert told.is_complete, told.reason
    assert told.requests == 3
    assert needles.where(tmp_path, tiers.tiers[0]) == set()
    ended = {}
    while engine.has_unfinished():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
        ops.check(engine.manager)
    for request_id in mine:
        assert isinstance(ended[request_id].error, RequestFailed)
        assert "purged" in str(ended[request_id].error)
    assert ended[other].error is None
    assert ended[other].outputs[0].token_ids == expected.outputs[0].token_ids
    settled(engine)
    assert needles.where(tmp_path, tiers.tiers[0]) == set()
    nothing_held(engine)
    engine.close()
    assert needles.where(tmp_path, tiers.tiers[0]) == set()


def test_slots_behind_the_tokens_of_others_are_overwritten_too():
    """A block that another tenant was given holds what was there before, behind its own tokens."""
    engine = make(trained_model(), None, num_blocks=11)
    pool, marker = engine._forward.pools[0], 7.03125
    pool.k.fill_(marker)  # as if the tenant had filled every block
    pool.v.fill_(marker)
    engine.add_request(prompt(1, 38), ENDLESS, scope=OTHER)
    engine.step()
    (seq,) = engine.manager.sequences.values()
    own, computed = seq.block_ids(0)[-1], seq.computed % BLOCK
    assert computed
    before = pool.k[:, own, :computed].clone()
    assert (pool.k[:, own, computed:] == marker).all()
    assert engine.purge("acme").is_complete
    for held in (pool.k, pool.v):
        assert not (held == marker).any()
    assert torch.equal(pool.k[:, own, :computed], before)
    engine.close()


def test_a_purge_without_tiers_or_of_nobody_known_is_complete():
    engine = make(tiny_model("llama"), None)
    told = engine.purge("nobody")
    assert (told.is_complete, told.blocks, told.tiers) == (True, {"full": 0}, {})
    with pytest.raises(ScopeError):
        engine.purge(1.5)
    engine.close()


@pytest.mark.cases(1)
def test_a_purge_from_within_a_step_is_refused_and_nothing_has_changed(tmp_path, tiers):
    engine = make(trained_model(), tiers)
    (expected,) = engine.generate([prompt(0)], SHORT, scope=MINE)
    refused = []

    def purges():
        before = ops.snapshot(engine.manager)
        with pytest.raises(CacheBusy, match="between two steps"):
            engine.purge("acme")
        assert ops.snapshot(engine.manager) == before
        refused.append(1)

    engine.when_computing(purges)
    needles = Needles(engine)
    (output,) = engine.generate([prompt(0)], SHORT, scope=MINE)
    assert len(refused) == SHORT.max_tokens
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    needles.take(MINE)
    settled(engine)
    assert engine.purge("acme").is_complete
    assert needles.where(tmp_path, tiers.tiers[0]) == set()
    engine.close()


@pytest.mark.cases(1)
def test_in_an_async_engine_others_stream_on_while_tiers_are_purged(tmp_path, tiers):
    engine = make(trained_model(), tiers)
    engine.generate([prompt(0)], SHORT, scope=MINE)
    settled(engine)
    goes, heard = threading.Event(), threading.Event()
    purge = tiers.tiers[1].purge

    def slow(*given):
        heard.set()
        assert goes.wait(30)
        return purge(*given)

    tiers.tiers[1].purge = slow

    async def stream(running, scope, first):
        told = 0
        async for output in running.generate(
            prompt(first),
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
            scope=scope,
        ):
            told = output.outputs[0].num_tokens
        return told

    async def both():
        running = AsyncEngine(engine)
        mine = asyncio.create_task(stream(running, MINE, 4))
        other = asyncio.create_task(stream(running, OTHER, 5))
        purging = asyncio.create_task(running.purge("acme"))
        await asyncio.to_thread(heard.wait, 30)
        assert await other == 60
        with pytest.raises(RequestFailed, match="purged"):
            await mine
        # What the tenant asks for meanwhile is computed: a tier that has it still does not give it.
        outputs = [each async for each in running.generate(prompt(0), SHORT, scope=MINE)]
        assert outputs[-1].num_cached_tokens == 0
        goes.set()
        told = await purging
        assert told.is_complete, told.reason
        running.close()

    asyncio.run(both())


@pytest.mark.system("redis-server")
def test_no_byte_of_a_tenant_is_left_in_a_dump_of_redis(tmp_path):
    from servers import running

    from quire.tiers.redis import Redis

    with running(tmp_path) as server, server.client() as client:
        key = TierKey(b"k" * 32, tenants=b"t" * 32)
        settings = StackSettings(key=key, **ALWAYS)
        with TierStack([Host("1MiB"), Redis(server.url)], settings) as stack:
            engine = make(trained_model(), stack)
            needles = Needles(engine)
            needles.found.add(key.tag(tenant_tag(MINE)))
            for number, scope in enumerate((MINE, OTHER, SALTED)):
                engine.generate([prompt(number)], SHORT, scope=scope)
            needles.take(MINE, SALTED)
            settled(engine)

            def found():
                held = {name: (client.dump(name), client.get(name)) for name in client.scan_iter()}
                data = [b"".join(filter(None, (name, *each))) for name, each in held.items()]
                return [n for n in needles.found for each in data if found_in_bytes("", each, n)]

            assert len(found()) > 10
            told = engine.purge("acme")
            assert told.is_complete, told.reason
            assert told.tiers["redis"].count > 10
            assert found() == []
            engine.manager.reset()
            (output,) = engine.generate([prompt(1)], SHORT, scope=OTHER)
            assert output.num_cached_tokens == 40
            engine.close()
            assert found() == []
