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
from quire_router.sent import EVENTS, Sent, SentPrompt, home_of  # noqa: E402

DEPLOYMENT = DeploymentID("Replica", "quire")
TEXT = np.arange(160, dtype=np.int32) % 50


class FakeReplica:
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


class RouterOfFakes:
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
        routed = RouterOfFakes(**options)
        with ExitStack() as stack:
            try:
                await steps(routed, stack)
            finally:
                routed.close()  # before the caches, of which it would wait for an answer

    asyncio.run(played())


def test_a_prompt_goes_to_the_replica_that_holds_most_of_it_as_they_come_and_go():
    async def steps(routed, stack):
        one, two, three = (Cache(stack) for _ in range(3))
        first, second = FakeReplica("one", one.events), FakeReplica("two", two.events)
        two.compute(TEXT)
        await routed.has(first, second)
        await routed.until({"two"})
        assert {await routed.chosen() for _ in range(6)} == {"two"}
        await routed.has(first)  # the other is gone
        assert await routed.chosen() == "one"
        await routed.until(set())
        one.compute(TEXT[:32])
        three.compute(TEXT[:96])
        await routed.has(first, FakeReplica("three", three.events))
        await routed.until({"one", "three"})
        assert {await routed.chosen() for _ in range(6)} == {"three"}
        assert set(routed.router._prefixes.index.replicas) == {"one", "three"}

    scenario(steps)


def test_overloaded_and_full_replicas_are_passed_over():
    async def steps(routed, stack):
        cache = Cache(stack)
        cache.compute(TEXT)
        fakes = [FakeReplica("one"), FakeReplica("two", cache.events), FakeReplica("three")]
        await routed.has(*fakes)
        await routed.until({"two"})
        assert await routed.chosen() == "two"
        fakes[1].load = 6
        routed.router.on_new_queue_len_info(fakes[1].replica_id, 6)
        assert await routed.chosen() in ("one", "three")
        for each in fakes:  # as much to do for all, but one has no room
            each.load = 6
            routed.router.on_new_queue_len_info(each.replica_id, 6)
        assert await routed.chosen() == "two"
        fakes[1].max_ongoing_requests = 6
        assert await routed.chosen() in ("one", "three")

    scenario(steps)


def test_the_router_finds_no_prefix_of_another_tenant_or_salt():
    async def steps(routed, stack):
        ann, bob = Cache(stack), Cache(stack)
        ann.compute(TEXT, "ann", None)
        bob.compute(TEXT, "bob", "s")
        await routed.has(FakeReplica("of ann", ann.events), FakeReplica("of bob", bob.events))
        await routed.until({"of ann"}, None, "ann")
        await routed.until({"of bob"}, "s", "bob")
        assert {await routed.chosen(tenant="ann") for _ in range(6)} == {"of ann"}
        assert {await routed.chosen(tenant="bob", salt="s") for _ in range(6)} == {"of bob"}
        for stranger in ({}, {"tenant": "bob"}, {"salt": "s"}, {"tenant": "ann", "salt": "s"}):
            assert len({await routed.chosen(**stranger) for _ in range(12)}) == 2, stranger

    scenario(steps)


def test_the_router_finds_no_prefix_of_another_adapter():
    async def steps(routed, stack):
        base, sql, law = (Cache(stack) for _ in range(3))
        base.compute(TEXT)
        sql.compute(TEXT, None, None, "sql")
        law.compute(TEXT[:96], None, "s", "law")
        names = ("of base", "of sql", "of law")
        caches = (base, sql, law)
        fakes = [FakeReplica(each, cache.events) for each, cache in zip(names, caches, strict=True)]
        await routed.has(*fakes)
        await routed.until({"of base"})
        await routed.until({"of sql"}, None, None, "sql")
        await routed.until({"of law"}, "s", None, "law")
        assert {await routed.chosen(model="sql") for _ in range(6)} == {"of sql"}
        assert {await routed.chosen(model="law", salt="s") for _ in range(6)} == {"of law"}
        assert {await routed.chosen(model="quire-tiny") for _ in range(6)} == {"of base"}
        assert len({await routed.chosen(model="law") for _ in range(12)}) > 1

    scenario(steps)


def test_a_request_with_a_home_goes_there_however_full_it_is():
    async def steps(routed, stack):
        cache = Cache(stack)
        cache.compute(TEXT)
        fakes = [FakeReplica("one"), FakeReplica("two", cache.events), FakeReplica("three")]
        await routed.has(*fakes)
        await routed.until({"two"})
        routed.router.on_new_queue_len_info(fakes[2].replica_id, 6)
        for prompt in (SentPrompt(TEXT), None):
            sent = Sent({}, b"", prompt, home_of("three"))
            assert {await routed.asked(sent) for _ in range(4)} == {"three"}
        gone = Sent({}, b"", SentPrompt(TEXT), home_of("gone"))
        assert await routed.asked(gone) == "two"

    scenario(steps)


def test_a_session_decides_among_equals_and_what_has_no_prompt_goes_to_the_least_loaded():
    async def steps(routed, stack):
        fakes = [FakeReplica(name) for name in ("one", "two", "three")]
        await routed.has(*fakes)
        homes = {}
        for session in map(str, range(9)):
            homes[session] = {await routed.chosen(session=session) for _ in range(3)}
            assert len(homes[session]) == 1
        assert set.union(*homes.values()) == {"one", "two", "three"}
        await routed.has(*fakes[:2])  # only the sessions of one that is gone move
        for session, home in homes.items():
            if home != {"three"}:
                assert await routed.chosen(session=session) in home
        routed.router.on_new_queue_len_info(fakes[0].replica_id, 1)
        for asked in ((), (Sent({}, b""),), ("anything",)):
            assert await routed.asked(*asked) == "two"

    scenario(steps)


def test_routers_that_look_at_no_prompt_follow_nobody():
    async def steps(routed, stack):
        cache = Cache(stack)
        cache.compute(TEXT)
        fakes = [FakeReplica("one", cache.events), FakeReplica("two"), FakeReplica("three")]
        await routed.has(*fakes)
        assert routed.router._prefixes is None
        turns = [await routed.chosen() for _ in range(6)]
        assert turns[:3] == turns[3:]
        assert set(turns) == {"one", "two", "three"}

    scenario(steps, router="round-robin")


def test_a_request_waits_while_there_is_no_replica():
    async def steps(routed, stack):
        asking = asyncio.ensure_future(routed.chosen())
        await asyncio.sleep(0.05)
        assert not asking.done()
        await routed.has(FakeReplica("late"))
        assert await asking == "late"

    scenario(steps)


def test_a_router_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="did you mean prefix"):
        scenario(None, router="prefx")
