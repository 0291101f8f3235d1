"""Logs of KV events as traces: what engines say they stored becomes requests."""

import gzip
import json

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from quire.cli.app import app
from quire.core import CacheManager
from quire.errors import ConfigError, TraceError
from quire.exchange import AllBlocksCleared
from quire.exchange.wire import StoredEvent
from quire.observe import save_events
from quire_sim.trace import Findings, open_trace
from watching import take_events, watchers

CLEARED = {"type": "AllBlocksCleared"}


def stored(hashes, parent=None, **others):
    fields = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [7] * (16 * len(hashes)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return fields | others


def as_maps(event):
    return event


def as_array(event):
    if event["type"] == "BlockStored":
        return [event["type"], *(event.get(name) for name in StoredEvent.__struct_fields__)]
    rest = [value for name, value in event.items() if name != "type"]
    return [event["type"], *rest]


def as_json(path, batches):
    path.write_bytes(b"".join(msgspec.json.encode(batch) + b"\n" for batch in batches))
    return path


def as_gzip(path, batches):
    path.write_bytes(gzip.compress(as_json(path, batches).read_bytes()))
    return path


def log(path, *batches, rank=None):
    """Write (time, event, ...) as batches of JSON."""
    return as_json(path, [[at, list(events), rank] for at, *events in batches])


def found(path):
    return [
        (r.time_s, r.prompt_tokens // 16, r.output_tokens // 16, r.blocks.tolist())
        for r in open_trace(path)
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events"


@pytest.mark.parametrize(("write", "name"), [(as_json, int), (as_json, str), (as_gzip, str)])
@pytest.mark.parametrize("form", [as_maps, as_array])
def test_events_as_maps_or_arrays_with_any_hash_give_the_same_trace(path, write, name, form):
    big = 2**63 + 5
    events = [
        (100.0, stored([name(big), name(1)])),
        (101.0, {"type": "BlockRemoved", "block_hashes": [name(1)], "medium": "GPU"}),
        (109.0, stored([name(n) for n in range(2, 40)], name(big))),
    ]
    write(path, [[at, [form(event)], 0] for at, event in events])
    assert open_trace(path).format == "kv-events"
    assert open_trace(path).block_size == 16
    assert found(path) == [(0.0, 2, 0, [0, 1]), (9.0, 39, 0, [0, *range(2, 40)])]


def test_a_request_is_what_was_stored_and_the_chain_before_it(path):
    log(path, (0, stored([10, 11, 12])), (20, stored([13], 11)), (40, stored([14], 13)))
    assert found(path) == [
        (0.0, 3, 0, [0, 1, 2]),
        (20.0, 3, 0, [0, 1, 3]),
        (40.0, 4, 0, [0, 1, 3, 4]),
    ]


def test_chunks_of_a_prompt_are_one_prompt_and_single_blocks_after_it_its_answer(path):
    log(
        path,
        (0, stored([1, 2, 3])),
        (0.5, stored([4, 5], 3)),
        (1, stored([6], 5)),
        (1.5, stored([7], 6)),
    )
    assert found(path) == [(0.0, 5, 2, [0, 1, 2, 3, 4])]


def test_parts_of_one_batch_are_one_part_even_block_by_block(path):
    log(path, (0, stored([1]), stored([2], 1), stored([3], 2)), (1, stored([4], 3)))
    assert found(path) == [(0.0, 3, 1, [0, 1, 2])]


def test_a_turn_that_follows_the_answer_is_a_request_of_its_own(path):
    log(path, (0, stored([1, 2])), (1, stored([3], 2)), (2, stored([4, 5], 3)))
    assert found(path) == [(0.0, 2, 1, [0, 1]), (2.0, 5, 0, [0, 1, 2, 3, 4])]
    log(path, (0, stored([1, 2])), (1, stored([3], 2)), (9, stored([4], 3)))
    assert found(path) == [(0.0, 2, 1, [0, 1]), (9.0, 4, 0, [0, 1, 2, 3])]


def test_requests_that_overlap_come_in_order_of_arrival(path):
    log(
        path,
        (0, stored([1, 2]), stored([11, 12])),
        (4, stored([3], 2)),
        (8, stored([21, 22])),
        (8, stored([4], 3)),
        (12, stored([5], 4)),
    )
    assert [row[:3] for row in found(path)] == [(0.0, 2, 3), (0.0, 2, 0), (8.0, 2, 0)]


def test_blocks_stored_again_after_their_removal_are_the_same_blocks(path):
    removed = {"type": "BlockRemoved", "block_hashes": [2, 1], "medium": "GPU"}
    log(path, (0, stored([1, 2])), (10, removed), (20, stored([1, 2, 3])))
    assert found(path) == [(0.0, 2, 0, [0, 1]), (20.0, 3, 0, [0, 1, 2])]


def test_a_request_after_a_clear_continues_no_earlier_block(path):
    log(path, (0, stored([1, 2])), (1, CLEARED), (2, stored([3], 2)))
    assert [row[1:3] for row in found(path)] == [(2, 0), (3, 0)]


def test_an_unknown_parent_stands_for_all_before_it_and_is_counted(path):
    log(path, (0, stored([5, 6], 4)), (20, stored([7], 4)))
    assert found(path) == [(0.0, 3, 0, [0, 1, 2]), (20.0, 2, 0, [0, 3])]
    report = Findings()
    list(open_trace(path).read(report))
    assert any(note.startswith("1 blocks that were never stored") for note in report.notes)


def test_copies_on_other_media_and_in_other_groups_make_no_requests(path):
    log(
        path,
        (0, stored([1, 2])),
        (1, stored([1, 2], medium="CPU"), stored([1, 2], group_idx=1)),
        (2, stored([3], 2, medium=None)),
    )
    assert found(path) == [(0.0, 2, 1, [0, 1])]
    report = Findings()
    list(open_trace(path).read(report))
    assert any(note.startswith("2 stores on other media than GPU") for note in report.notes)


def test_ranks_store_for_themselves_and_share_names(path):
    batches = [[0, [stored([1, 2])], 0], [1, [stored([3], 2)], 1], [2, [stored([4], 2)], 0]]
    as_json(path, batches)
    assert found(path) == [(0.0, 2, 1, [0, 1]), (1.0, 3, 0, [0, 1, 2])]


def test_batches_that_come_late_count_as_of_the_one_before(path):
    log(path, (10, stored([1])), (9, stored([2])), (30, stored([3])))
    assert [row[0] for row in found(path)] == [0.0, 0.0, 20.0]


BAD = {
    "no JSON": ("[1, [", r"batch 2: not JSON"),
    "no batch": ("3", r"batch 2: a batch is \[time, events, rank\], this is 3"),
    "no time": ('["x", []]', r"batch 2: ts is 'x': expected float, got str"),
    "no events": ("[1, 2]", r"batch 2: events is 2: expected array, got int"),
    "no event": ("[1, [2]]", r"batch 2: event 1: an event is a map with a type.*: 2"),
    "an event without a type": ('[1, [{"a": 1}]]', r"batch 2: event 1 has no type"),
    "no hashes": (
        '[1, [{"type": "BlockStored", "block_hashes": 5}]]',
        r"batch 2: event 1: block_hashes is 5: expected array, got int",
    ),
    "a hash of another kind": (
        '[1, [{"type": "BlockStored", "block_hashes": [1.5]}]]',
        r"batch 2: event 1: block_hashes\[0\] is 1.5: expected int \| str, got float",
    ),
    "no block size": (
        '[1, [{"type": "BlockStored", "block_hashes": [1], "block_size": 0}]]',
        r"batch 2: event 1: block_size is 0: expected int >= 1",
    ),
    "another block size": (
        '[1, [{"type": "BlockStored", "block_hashes": [1], "block_size": 32}]]',
        r"batch 2: blocks of 32 tokens after blocks of 16",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_batch_is_refused_with_its_line_number(path, case):
    line, why = BAD[case]
    path.write_text(json.dumps([0, [stored([1])], None]) + "\n" + line + "\n")
    with pytest.raises(TraceError, match=why):
        list(open_trace(path))


def test_a_log_in_which_nothing_is_stored_is_refused(path):
    log(path, (0, CLEARED))
    with pytest.raises(TraceError, match="no block is stored"):
        open_trace(path)


def test_the_block_size_is_the_logs(path):
    log(path, (0, stored([1])))
    with pytest.raises(ConfigError, match="blocks of 16 tokens, not of 32"):
        open_trace(path, block_size=32)


def test_quires_own_events_give_back_the_requests(path):
    manager = CacheManager(40, 4, watchers=watchers(events=True))
    rng = np.random.default_rng(0)
    base = rng.integers(0, 999, 12).astype(np.int32)
    prompts = [np.concatenate((base, rng.integers(0, 999, 9).astype(np.int32))) for _ in range(8)]
    for at, prompt in enumerate(prompts):
        seq = manager.open(prompt)
        manager.reserve(seq, len(prompt) - seq.num_cached)
        manager.commit(seq, prompt[seq.num_cached :])
        manager.close(seq)
        save_events(path, take_events(manager), 60.0 * at)
    rows = list(open_trace(path))
    assert manager.stats.evicted_blocks == 0
    assert [row.time_s for row in rows] == [60.0 * at for at in range(8)]
    assert [row.blocks.tolist() for row in rows] == [
        [0, 1, 2, 3 + 2 * at, 4 + 2 * at] for at in range(8)
    ]
    assert save_events(path, [], 600.0) == 0


def test_a_log_of_events_holds_no_tokens(path):
    manager = CacheManager(40, 4, watchers=watchers(events=True))
    seq = manager.open([123454321] * 8)
    manager.reserve(seq, 8)
    manager.commit(seq, [123454321] * 8)
    manager.close(seq)
    save_events(path, take_events(manager), 0.0)
    assert b"123454321" not in path.read_bytes()
    with pytest.raises(ConfigError, match="cannot write events"):
        save_events(path / "no" / "such", [AllBlocksCleared()], 0.0)


def test_trace_info_says_what_was_made_of_the_events(path):
    log(path, (0, stored([5, 6], 4)))
    result = CliRunner().invoke(app, ["trace", "info", str(path)])
    assert result.exit_code == 0, result.output
    assert "kv-events" in result.output
    assert "made of blocks that were stored" in result.output
    result = CliRunner().invoke(app, ["trace", "info", str(path), "--json"])
    assert len(json.loads(result.stdout)["notes"]) == 2
