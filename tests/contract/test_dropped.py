"""A manager that is dropped, or reset, gives the memory of its tree back."""

import gc
import weakref

import numpy as np
import pytest
from core_help import prefill, run, serve

from quire import ops
from quire.core import CacheManager, Hint, LayerGroup
from quire.exchange import hold
from quire.groups import Recurrent, SlidingWindow
from watching import watchers

FULL = LayerGroup("full", 64)
MIXES = {
    "full": [FULL],
    "window": [FULL, LayerGroup("window", 64, SlidingWindow(8))],
    "states": [FULL, LayerGroup("states", 8, Recurrent())],
}
over_mixes = pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES)


@over_mixes
@pytest.mark.parametrize("by", ["del", "reset"])
def test_no_node_holds_another_when_the_tree_is_gone(groups, by):
    manager = CacheManager(groups=groups, block_size=4)
    for own in (1000, 2000):
        serve(manager, np.concatenate([run(0, 20), run(own, 20)]))
    nodes = list(manager.kernel.tree.nodes())
    assert len(nodes) == 3
    if by == "reset":
        manager.reset()
    else:
        del manager
    gc.collect()
    assert not any(node.parent or node.children for node in nodes)


LEFT = {
    "a request": lambda m, a: None,
    "a fork": lambda m, a: m.fork(a),
    "a request with room": lambda m, a: m.reserve(a, 9),
    "a suspended request": lambda m, a: m.suspend(a),
    "a batch": lambda m, a: m.reserve_step(m.batch([a])),
    "a pin": lambda m, a: ops.pin(m, run(0, 8)),
    "a hold": hold,
    "a request of a session": lambda m, a: m.open(run(0, 9), hint=Hint("session", session_id="s")),
}


@pytest.mark.cases(35)
@over_mixes
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "learned"])
@pytest.mark.parametrize("left", LEFT)
def test_a_manager_dropped_while_requests_run_is_freed(groups, policy, left):
    watched = watchers(events=True, evictions=True, curve=True)
    manager = CacheManager(groups=groups, block_size=4, policy=policy, watchers=watched)
    serve(manager, run(0, 20))
    LEFT[left](manager, prefill(manager, run(0, 30)))
    kept = [weakref.ref(manager), weakref.ref(manager.kernel.tree)]
    del manager, watched
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
