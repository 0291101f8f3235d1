"""The request router of Ray Serve, among replicas that come, go, fill up and tell what they hold."""

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest
from upstream_help import wait_for

pytest.importorskip("ray.serve", reason="install it with: pip install 'ray[serve]'")
zmq = pytest.importorskip("quire.observe.zmq", reason="install it with: pip install pyzmq")

from ray.serve._private.common import (  # noqa: E402
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest  # noqa: E402

from quire import CacheManager  # noqa: E402
from quire.errors import ConfigError  # noqa: E402
from quire.exchange import EventLog  # noqa: E402
from quire.web.keys import scope_of  # noqa: E402
from quire_router.request_router import ReplicaRouter  # noqa: E402
from quire_router.sent import EVENTS, Sent, SentPrompt  # noqa: E402

DEPLOYMENT = DeploymentID("Replica", "quire")
TEXT = np.arange(160, dtype=np.int32) % 50


class Fake:
    """A replica as a router sees it: its name, its metadata, how much it has to do and may have."""

    def __init__(self, name, events=None, most=8):
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.replica_metadata = {} if events is None else {EVENTS: events}
        self.max_ongoing_requests = most
        self.load = 0

    async def get_queue_len(self, *, deadline_s):
        return self.load


class Cache:
    """A manager whose events are published."""

    def __init__(self, stack):
        self.manager = CacheManager(100, 16, watchers=[EventLog()])
        made = zmq.Publisher(self.manager, "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0")
        stack.enter_context(made)
        self.events = f"{made.endpoint},{made.replay}"

    def compute(self, tokens, *owner):
        seq = self.manager.open(tokens, scope=scope_of(*owner) if owner else None)
        self.manager.reserve(seq, len(tokens) - seq.num_cached)
        self.manager.commit(seq, tokens[seq.num_cached :])
        self.manager.close(seq)


class World:
    """A router, and fakes that it knows of."""

    def __init__(self, **options):
        self.router = ReplicaRouter(
            DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.router.initialize_state(num_blocks=1 << 10, **options)
        self._numbers = iter(range(10**6))

    async def has(self, *fakes):
        self.router.update_replicas(list(fakes))
        await asyncio.sleep(0.01)  # it asks the new ones how much they have to do

    async def chosen(self, tokens=TEXT, **more):
        """Return who gets a prompt, as Ray Serve asks the router for it."""
        sent = Sent({}, b"", SentPrompt(tokens, **more))
        return await self.asked(sent)

    async def asked(self, *args):
        metadata = RequestMetadata(str(next(self._numbers)), str(next(self._numbers)))
        pending = PendingRequest(args=list(args), kwargs={}, metadata=metadata)
        async with asyncio.timeout(10):
            chosen = await self.router._choose_replica_for_request(pending)
        return chosen.replica_id.unique_id

    async def until(self, holders, *owner):
        """Wait until it is known that these, and no others, hold something of the text for its owner."""

        def known():
            return self.router._prefixes.found(TEXT, *(owner or (None, None))).keys() == holders

        await asyncio.to_thread(wait_for, known)

    def close(self):
        if self.router._prefixes is not None:
            self.router._prefixes.close()


def scenario(steps, **options):
    async def played():
        world = World(**options)
        with ExitStack() as stack:
            try:
                await steps(world, stack)
            finally:
                world.close()  # before the caches, of which it would wait for an answer

    asyncio.run(played())


def test_a_prompt_goes_to_the_replica_that_holds_most_of_it_as_they_come_and_go():
    async def steps(world, stack):
        one, two, three = (Cache(stack) for _ in range(3))
        first, second = Fake("one", one.events), Fake("two", two.events)
        two.compute(TEXT)
        await world.has(first, second)
        await world.until({"two"})
        assert {await world.chosen() for _ in range(6)} == {"two"}
        await world.has(first)  # the other is gone
        assert await world.chosen() == "one"
        await world.until(set())
        one.compute(TEXT[:32])
        three.compute(TEXT[:96])
        await world.has(first, Fake("three", three.events))
        await world.until({"one", "three"})
        assert {await world.chosen() for _ in range(6)} == {"three"}
        assert set(world.router._prefixes.index.replicas) == {"one", "three"}

    scenario(steps)


def test_overloaded_and_full_replicas_are_passed_over():
    async def steps(world, stack):
        cache = Cache(stack)
        cache.compute(TEXT)
        fakes = [Fake("one"), Fake("two", cache.events), Fake("three")]
        await world.has(*fakes)
        await world.until({"two"})
        assert await world.chosen() == "two"
        fakes[1].load = 6
        world.router.on_new_queue_len_info(fakes[1].replica_id, 6)
        assert await world.chosen() in ("one", "three")
        for each in fakes:  # as much to do for all, but one has no room
            each.load = 6
            world.router.on_new_queue_len_info(each.replica_id, 6)
        assert await world.chosen() == "two"
        fakes[1].max_ongoing_requests = 6
        assert await world.chosen() in ("one", "three")

    scenario(steps)


def test_the_router_finds_no_prefix_of_another_tenant_or_salt():
    async def steps(world, stack):
        ann, bob = Cache(stack), Cache(stack)
        ann.compute(TEXT, "ann", None)
        bob.compute(TEXT, "bob", "s")
        await world.has(Fake("of ann", ann.events), Fake("of bob", bob.events))
        await world.until({"of ann"}, None, "ann")
        await world.until({"of bob"}, "s", "bob")
        assert {await world.chosen(tenant="ann") for _ in range(6)} == {"of ann"}
        assert {await world.chosen(tenant="bob", salt="s") for _ in range(6)} == {"of bob"}
        for stranger in ({}, {"tenant": "bob"}, {"salt": "s"}, {"tenant": "ann", "salt": "s"}):
            assert len({await world.chosen(**stranger) for _ in range(12)}) == 2, stranger

    scenario(steps)


def test_a_session_decides_among_equals_and_what_has_no_prompt_goes_to_the_least_loaded():
    async def steps(world, stack):
        fakes = [Fake(name) for name in ("one", "two", "three")]
        await world.has(*fakes)
        homes = {}
        for session in map(str, range(9)):
            homes[session] = {await world.chosen(session=session) for _ in range(3)}
            assert len(homes[session]) == 1
        assert set.union(*homes.values()) == {"one", "two", "three"}
        await world.has(*fakes[:2])  # only the sessions of one that is gone move
        for session, home in homes.items():
            if home != {"three"}:
                assert await world.chosen(session=session) in home
        world.router.on_new_queue_len_info(fakes[0].replica_id, 1)
        for asked in ((), (Sent({}, b""),), ("anything",)):
            assert await world.asked(*asked) == "two"

    scenario(steps)


def test_routers_that_look_at_no_prompt_follow_nobody():
    async def steps(world, stack):
        cache = Cache(stack)
        cache.compute(TEXT)
        fakes = [Fake("one", cache.events), Fake("two"), Fake("three")]
        await world.has(*fakes)
        assert world.router._prefixes is None
        turns = [await world.chosen() for _ in range(6)]
        assert turns[:3] == turns[3:]
        assert set(turns) == {"one", "two", "three"}

    scenario(steps, router="round-robin")


def test_a_request_waits_while_there_is_no_replica():
    async def steps(world, stack):
        asking = asyncio.ensure_future(world.chosen())
        await asyncio.sleep(0.05)
        assert not asking.done()
        await world.has(Fake("late"))
        assert await asking == "late"

    scenario(steps)


def test_a_router_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="did you mean prefix"):
        scenario(None, router="prefx")
