"""quire's L2 adapter under LMCache's own classes, in the environment that has them; prints the checks that held.

PYTHONPATH=src:tests .venv-peers/bin/python tests/behind_lmcache/lmcache_run.py
"""

import select
import time
from contextlib import contextmanager

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from peer_checks import run_checks
from quire.errors import ConfigError

SETTINGS = {"close_timeout_s": 60, "load_timeout_s": 20, "lookup_timeout_s": 20}


@contextmanager
def adapter(*tiers, **params):
    """Open the adapter as LMCache does: by its plug-in type."""
    params = {"tiers": [*map(str, tiers)], "weights": "one", "settings": SETTINGS} | params
    config = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "quire.engines.lmcache",
            "class_name": "QuireL2Adapter",
            "adapter_params": params,
        }
    )
    made = create_l2_adapter(config)
    made.set_backend_identity("quire")
    try:
        yield made
    finally:
        made.close()


def keys_of(count, first=0, **more):
    more = {"model_name": "some/model", "kv_rank": 0x01000100} | more
    return [ObjectKey(chunk_hash=bytes([first + at]) * 32, **more) for at in range(count)]


def objects_of(fills, shape=(2, 3, 16, 8), dtype=torch.bfloat16):
    made = []
    for fill in fills:
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.full((size,), fill, dtype=torch.uint8)
        metadata = MemoryObjMetadata(
            torch.Size(shape), dtype, raw.data_ptr(), size, 1, fmt=MemoryFormat.KV_2LTD
        )
        made.append(TensorMemoryObj(raw, metadata, None))
    return made


def waited(fd, ask):
    """Wait for the event of a task, then take its result."""
    until = time.monotonic() + 30
    while (result := ask()) in (None, {}):
        assert time.monotonic() < until
        if select.select([fd], [], [], 1)[0]:
            consume_fd(fd)
    return result


def store(made, keys, objects):
    task = made.submit_store_task(keys, objects)
    results = waited(made.get_store_event_fd(), made.pop_completed_store_tasks)
    assert [*results] == [task]
    assert made.pop_completed_store_tasks() == {}
    made._stack.open_stack.drain(20)
    return results[task]


def look_up(made, keys):
    task = made.submit_lookup_and_lock_task(keys, {})
    bits = waited(
        made.get_lookup_and_lock_event_fd(), lambda: made.query_lookup_and_lock_result(task)
    )
    assert made.query_lookup_and_lock_result(task) is None
    return [bits.test(at) for at in range(len(keys))]


def load(made, keys, objects):
    task = made.submit_load_task(keys, objects)
    bits = waited(made.get_load_event_fd(), lambda: made.query_load_result(task))
    assert made.query_load_result(task) is None
    made.submit_unlock(keys)
    return [bits.test(at) for at in range(len(keys))]


def fills(objects):
    return [set(bytes(each.byte_array)) for each in objects]


def check_objects_outlive_the_adapter_and_come_back_as_they_were(place):
    line = f"disk:{place}?capacity=16MiB"
    with adapter(line) as made:
        assert (
            len(
                {
                    made.get_store_event_fd(),
                    made.get_load_event_fd(),
                    made.get_lookup_and_lock_event_fd(),
                }
            )
            == 3
        )
        result = store(made, keys_of(3), objects_of([1, 2, 3]))
        assert (result.is_successful(), result.bytes_transferred()) == (True, 3 * 1536)
        assert store(made, keys_of(3), objects_of([1, 2, 3])).is_successful()
    with adapter(line) as made:
        asked = [*keys_of(3), *keys_of(2, 50)]
        assert look_up(made, asked) == [True, True, True, False, False]
        into = objects_of([9] * 5)
        assert load(made, asked, into) == [True, True, True, False, False]
        assert fills(into) == [{1}, {2}, {3}, {9}, {9}]


def check_ranks_groups_salts_models_and_weights_are_other_objects(place):
    line = f"files:{place}"
    with adapter(line) as made:
        store(made, keys_of(1), objects_of([1]))
        others = [
            *keys_of(1, kv_rank=0x02000200),
            *keys_of(1, object_group_id=1),
            *keys_of(1, cache_salt="acme"),
            *keys_of(1, model_name="other/model"),
        ]
        assert look_up(made, [*keys_of(1), *others]) == [True] + [False] * 4
        with adapter(line, weights="two") as other:
            assert look_up(other, keys_of(1)) == [False]
        with adapter(line) as same:
            assert look_up(same, keys_of(1)) == [True]


def check_other_types_shapes_and_sizes_do_not_come(place):
    with adapter(f"files:{place}") as made:
        store(made, keys_of(1), objects_of([1]))
        for into in (
            objects_of([9], dtype=torch.float16),
            objects_of([9], shape=(2, 3, 8, 16)),
            objects_of([9], shape=(2, 3, 16, 16)),
        ):
            assert load(made, keys_of(1), into) == [False]
            assert fills(into) == [{9}]
        mixed = [*objects_of([9]), *objects_of([8], shape=(2, 3, 16, 16))]
        assert load(made, keys_of(2), mixed) == [True, False]


def check_objects_of_several_sizes_and_models_go_in_one_task(place):
    keys = [*keys_of(2), *keys_of(2, model_name="other/model")]
    shapes = [(2, 3, 16, 8), (2, 3, 4, 8), (2, 3, 16, 8), (2, 3, 4, 8)]
    with adapter(f"disk:{place}?capacity=16MiB") as made:
        given = [objects_of([at + 1], shape)[0] for at, shape in enumerate(shapes)]
        assert store(made, keys, given).bytes_transferred() == 2 * (1536 + 384)
        into = [objects_of([9], shape)[0] for shape in shapes]
        assert look_up(made, keys) == [True] * 4
        assert load(made, keys, into) == [True] * 4
        assert fills(into) == [{1}, {2}, {3}, {4}]


def check_a_damaged_object_does_not_come(place):
    with adapter(f"files:{place}") as made:
        store(made, keys_of(2), objects_of([1, 2]))
        record = next(
            each for each in place.rglob("*") if each.is_file() and each.stat().st_size > 1500
        )
        held = bytearray(record.read_bytes())
        held[-40] ^= 1
        record.write_bytes(held)
        into = objects_of([9, 9])
        came = load(made, keys_of(2), into)
        assert sorted(came) == [False, True]
        assert sorted(map(min, fills(into))) == [1, 9] or sorted(map(min, fills(into))) == [2, 9]


def check_a_tier_that_is_down_ends_every_task(place):
    quick = SETTINGS | {"load_timeout_s": 0.3, "lookup_timeout_s": 0.1, "close_timeout_s": 0.5}
    with adapter("redis://127.0.0.1:1", settings=quick) as made:
        store(made, keys_of(2), objects_of([1, 2]))
        assert look_up(made, keys_of(2)) == [False, False]
        assert load(made, keys_of(2), objects_of([9, 9])) == [False, False]
        assert not made.report_status()["is_healthy"]
    with adapter(f"disk:{place}?capacity=16MiB") as made:
        made._stack.load = made._stack.found = made._stack.store = None  # a bug
        assert not store(made, keys_of(1), objects_of([1])).is_successful()
        assert look_up(made, keys_of(1)) == [False]
        assert load(made, keys_of(1), objects_of([9])) == [False]


def check_deleted_objects_are_gone_and_listeners_are_told(place):
    class Listener:
        def __init__(self):
            self.told = []

        def on_l2_keys_stored(self, keys, sizes):
            self.told.append(("stored", len(keys), sum(sizes)))

        def on_l2_keys_accessed(self, keys):
            self.told.append(("accessed", len(keys)))

        def on_l2_keys_deleted(self, keys):
            self.told.append(("deleted", len(keys)))

    listener = Listener()
    with adapter(f"disk:{place}?capacity=16MiB") as made:
        made.register_listener(listener)
        store(made, keys_of(3), objects_of([1, 2, 3]))
        assert made.get_usage().total_bytes_used > 3 * 1536
        assert made.get_usage().usage_fraction == -1
        load(made, keys_of(2), objects_of([9, 9]))
        made.delete(keys_of(1))
        assert look_up(made, keys_of(3)) == [False, True, True]
        status = made.report_status()
        assert status["is_healthy"]
        assert status["tiers"]["disk"]["records"] == 2
    assert listener.told == [("stored", 3, 3 * 1536), ("accessed", 2), ("deleted", 1)]


def check_two_servers_share_what_lies_in_files(place):
    with adapter(f"files:{place}") as one, adapter(f"files:{place}") as other:
        store(one, keys_of(2), objects_of([1, 2]))
        into = objects_of([9, 9])
        assert load(other, keys_of(2), into) == [True, True]
        assert fills(into) == [{1}, {2}]
    with adapter(f"disk:{place}/{{rank}}?capacity=1MiB", rank="b") as made:
        store(made, keys_of(1), objects_of([1]))
        assert (place / "b").is_dir()


def check_unknown_options_are_refused(place):
    for wrong in ({"capacity": 1}, {"tiers": []}, {"weights": None}):
        try:
            with adapter(f"files:{place}", **wrong):
                pass
        except ConfigError as error:
            told = str(error)
        else:
            told = ""
        assert "adapter_params" in told, wrong


if __name__ == "__main__":
    run_checks(globals())
