"""A manager that is dropped, or reset, gives the memory of its tree back."""

import gc

import numpy as np
import pytest
from core_help import run, serve

from quire.core import CacheManager, LayerGroup, Recurrent, SlidingWindow

FULL = LayerGroup("full", 64)


@pytest.mark.parametrize(
    "groups",
    [
        [FULL],
        [FULL, LayerGroup("window", 64, SlidingWindow(8))],
        [FULL, LayerGroup("states", 8, Recurrent())],
    ],
    ids=["full", "window", "states"],
)
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
