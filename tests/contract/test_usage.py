"""Figures and pictures for people: how full a pool is, and the tree drawn."""

import pytest
from core_help import found, prefill, run, serve

from quire import CacheManager, LayerGroup, SlidingWindow, ops

BLOCK = 4


@pytest.fixture
def manager():
    return CacheManager(num_blocks=32, block_size=BLOCK)


def test_blocks_held_and_free_are_counted(manager):
    seq = prefill(manager, run(0, 20))
    serve(manager, run(1000, 10))
    usage = ops.usage(manager)
    assert (usage.num_blocks, usage.active, usage.cached, usage.free) == (32, 5, 2, 25)
    manager.close(seq)
    ops.clear(manager)
    usage = ops.usage(manager)
    assert (usage.active, usage.cached, usage.free) == (0, 0, 32)


def test_utilisation_follows_from_the_blocks(manager):
    first, _ = prefill(manager, run(0, 16)), prefill(manager, run(1000, 13))
    assert ops.usage(manager).utilisation == 8 / 32
    manager.close(first)
    assert ops.usage(manager).utilisation == 8 / 32
    ops.clear(manager)
    assert ops.usage(manager).utilisation == 4 / 32


def test_shared_blocks_are_counted_once(manager):
    for start in (1000, 2000, 3000):
        prefill(manager, [*run(0, 16), *run(start, 5)])
    assert ops.usage(manager).active == 4 + 3 * 2


def test_a_prefix_is_registered_under_a_name_and_found_while_everything_else_goes(manager):
    texts = {"system": run(0, 8), "tools": run(1000, 4)}
    for text in texts.values():
        serve(manager, text)
    names = {name: ops.pin(manager, text) for name, text in texts.items()}
    for start in range(2000, 9000, 1000):
        serve(manager, run(start, 80))
    assert names["tools"].tokens.tolist() == texts["tools"].tolist()
    names.pop("system").close()
    serve(manager, run(9000, 124))
    assert (found(manager, texts["system"]), found(manager, texts["tools"])) == (0, 4)


# -- pictures ------------------------------------------------------------------------------


def test_the_tree_is_drawn_with_its_blocks_and_locks():
    manager = CacheManager(num_blocks=16, block_size=BLOCK, sub_block=False)
    system = run(0, 8).tolist()
    serve(manager, [*system, *range(100, 108)])
    prefill(manager, [*system, *range(200, 205)], priority=2)
    picture = ops.dump(manager).splitlines()
    assert picture[1:-1] == [
        "Scope()",
        "└── 2 blocks, tokens 0-8: [0, 1, 2, 3, 4, 5, ...]  1 ref, priority 2",
        "    ├── 2 blocks, tokens 8-16: [100, 101, 102, 103, 104, 105, ...]  cached",
        "    └── 1 blocks, tokens 8-12: [200, 201, 202, 203, ...]  1 ref, priority 2",
        "sequence 0 open: 12 published <= 13 computed <= 13 capacity",
    ]
    assert "4 active # 2 cached + 10 free . of 16 blocks of 4 tokens" in picture[0]


def test_the_drawing_says_what_a_window_has_dropped():
    groups = [LayerGroup("full", 32), LayerGroup("sliding", 12, SlidingWindow(8, interval=16))]
    manager = CacheManager(groups=groups, block_size=BLOCK, sub_block=False)
    serve(manager, run(0, 24))
    ops.reclaim(manager, 3, group=1)
    (node,) = [line for line in ops.dump(manager).splitlines() if "tokens 0-24" in line]
    assert node.endswith("cached, sliding 3/6")
