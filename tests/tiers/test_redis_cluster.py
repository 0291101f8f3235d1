"""A real cluster that moves slots, loses nodes and makes replicas masters."""

from contextlib import suppress

import pytest
import redis
from processes import wait_until
from redis_help import get
from servers import NODE_TIMING, RedisServer, running_cluster

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import names_of, records_of
from quire.tiers.redis import Redis

HIT, ABSENT, STORED, PRESENT = Outcome.HIT, Outcome.ABSENT, Outcome.STORED, Outcome.PRESENT
ERROR, TIMEOUT = Outcome.ERROR, Outcome.TIMEOUT


pytestmark = pytest.mark.system("redis-server")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def open_tier(nodes, request):
    tiers = []

    def open_one(**words):
        words = {"prefix": f"{request.node.name}:", **words}
        tiers.append(Redis(nodes[1].url.replace("redis:", "redis+cluster:"), **words))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.check()
        tier.close()


def node_of(nodes, tier, key):
    """The number of the node where the tier believes a key."""
    (name,) = tier._names([key])
    owner = tier._servers.owner_of(name)
    return next(number for number, node in enumerate(nodes) if owner.endswith(f":{node.port}"))


@pytest.mark.ci
def test_records_are_spread_over_all_nodes_and_listed_from_all(nodes, open_tier):
    tier = open_tier()
    keys = names_of(range(90))
    assert tier.put(keys, records_of(keys)) == [STORED] * 90
    assert {node_of(nodes, tier, key) for key in keys} == {0, 1, 2}
    assert sorted(entry.key for entry in tier.scan()) == sorted(keys)


def test_a_node_that_hangs_costs_its_own_keys_and_a_share_of_the_time(nodes, open_tier):
    tier = open_tier()
    keys = names_of(range(60))
    tier.put(keys, records_of(keys))
    with nodes[0].hanging():
        outcomes = get(tier, keys, timeout_s=1.5)
    for key, outcome in zip(keys, outcomes, strict=True):
        assert outcome is (TIMEOUT if node_of(nodes, tier, key) == 0 else HIT)


def test_a_slot_on_its_way_is_found_on_either_side_and_then_at_its_new_node(nodes, open_tier):
    tier = open_tier(prefix="{one slot}:")
    keys = names_of(range(4))
    tier.put(keys[:2], records_of(keys[:2]))
    (name,) = tier._names(keys[:1])
    old = node_of(nodes, tier, keys[0])
    new = (old + 1) % 3
    with nodes[old].client() as source, nodes[new].client() as target:
        slot = source.execute_command("CLUSTER KEYSLOT", name)
        ids = [client.execute_command("CLUSTER MYID").decode() for client in (source, target)]
        target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        source.execute_command("MIGRATE", "127.0.0.1", nodes[new].port, name, 0, 1000)

        # ASK: what has moved, and what is new, is over there; the map stays as it is.
        assert get(tier, keys) == [HIT, HIT, ABSENT, ABSENT]
        assert tier.put(keys[1:3], records_of(keys[1:3])) == [PRESENT, STORED]
        with pytest.raises(redis.ResponseError):
            target.exists(tier._names(keys[2:3])[0])
        assert tier.contains(keys) == [True, True, True, False]
        assert node_of(nodes, tier, keys[0]) == old

        source.execute_command(
            "MIGRATE", "127.0.0.1", nodes[new].port, "", 0, 1000, "KEYS", *tier._names(keys[1:2])
        )
        for client in (target, source):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])

    # MOVED: the map learns.
    assert get(tier, keys) == [HIT, HIT, HIT, ABSENT]
    wait_until(lambda: node_of(nodes, tier, keys[0]) == new, "the new map")
    tier.delete(keys)
    assert tier.contains(keys) == [False] * 4


@pytest.mark.ci
def test_a_replica_that_took_over_is_found_though_the_old_master_is_gone(tmp_path):
    with running_cluster(tmp_path) as nodes:
        replica = RedisServer(tmp_path, "--cluster-enabled", "yes", *NODE_TIMING)
        nodes.append(replica)
        for node in nodes[:3]:
            replica.meet(node)
        with Redis(nodes[0].url.replace("redis:", "redis+cluster:")) as tier:
            keys = names_of(range(30))
            tier.put(keys, records_of(keys))
            mine = [key for key in keys if node_of(nodes, tier, key) == 2]
            with nodes[2].client() as old, replica.client() as new:
                old.config_set("repl-diskless-sync-delay", 0)
                master = old.execute_command("CLUSTER MYID")
                wait_until(lambda: replicates(new, master), "replication")
                wait_until(lambda: new.dbsize() == old.dbsize(), "the copy")
                voters = nodes[:2]
                wait_until(lambda: all(is_replica(node, new) for node in voters), "its voters")
                wait_until(lambda: took_over(new), "the failover")
            wait_until(lambda: all(knows(node, replica) for node in nodes[:2]), "the news")
            nodes[2].stop()
            assert set(get(tier, mine)) <= {ERROR, HIT}
            wait_until(lambda: get(tier, mine) == [HIT] * len(mine), "the new map")
            assert get(tier, keys) == [HIT] * 30


def knows(node, master) -> bool:
    """Whether a node knows of another one that it has slots."""
    with node.client() as client:
        rows = client.execute_command("CLUSTER SLOTS")
    return master.port in [row[2][1] for row in rows]


def is_replica(node, client) -> bool:
    """Whether a node knows of a client's server that it replicates; else it has no vote for it."""
    name = client.execute_command("CLUSTER MYID").decode()
    with node.client() as asked:
        flags = [
            each["flags"] for each in asked.cluster("NODES").values() if each["node_id"] == name
        ]
    return any("slave" in each for each in flags)


def replicates(client, master) -> bool:
    try:
        client.execute_command("CLUSTER REPLICATE", master)
    except redis.ResponseError:
        return False
    return client.info("replication")["master_link_status"] == "up"


def took_over(client) -> bool:
    """Ask a replica to take over, which the others vote on; say so when it has."""
    if client.info("replication")["role"] == "master":
        return True
    client.execute_command("CLUSTER FAILOVER")
    with suppress(AssertionError):
        wait_until(lambda: client.info("replication")["role"] == "master", "the vote", 6.0)
    return client.info("replication")["role"] == "master"


def test_a_cluster_of_which_only_one_node_answers_finds_that_nodes_keys(nodes, open_tier):
    tier = open_tier()
    keys = names_of(range(40))
    tier.put(keys, records_of(keys))
    with nodes[0].hanging(), nodes[2].hanging():
        outcomes = get(tier, keys, timeout_s=2.0)
        there = [outcome is HIT for outcome in outcomes]
        assert there == [node_of(nodes, tier, key) == 1 for key in keys]


def test_a_cluster_by_the_url_of_one_server_is_refused_with_the_right_url(nodes):
    with pytest.raises(TierError, match=r"write redis\+cluster://"):
        Redis(nodes[0].url)


def test_a_single_server_under_a_cluster_url_is_refused(tmp_path):
    server = RedisServer(tmp_path)
    try:
        with pytest.raises(TierError, match=r"no map of slots .* Cluster mode is not enabled"):
            Redis(server.url.replace("redis:", "redis+cluster:"))
    finally:
        server.stop()
