"""KV events on the wire: the bytes that vLLM writes, those of older and newer versions, and those that are none."""

import json
from pathlib import Path

import msgspec
import pytest

from quire.errors import RecordError
from quire.exchange.hashing import block_hashes
from quire.exchange.wire import (
    ClearedEvent,
    EventBatch,
    RemovedEvent,
    StoredEvent,
    UnknownEvent,
    decode_batch,
    encode_batch,
    wire_hash,
)
from quire.observe import Mirror

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "kv_events.json").read_text("utf-8"))
"""What the classes of vllm.distributed.kv_events of vLLM 0.32.0 write, in hex."""

BIG = 2**64 - 3
BATCHES = {
    "stored": EventBatch(
        1234.5,
        [
            StoredEvent(
                [BIG, 7],
                None,
                [1, 2, 3, 128255],
                2,
                None,
                "GPU",
                None,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        ],
        0,
    ),
    "all fields": EventBatch(
        1234.5,
        [
            StoredEvent(
                [b"\x01" * 32],
                BIG,
                [1, 2],
                2,
                3,
                "CPU",
                "poet",
                [["poet", ["aaaaaaaa", 5], "salt"]],
                1,
                "sliding_window",
                64,
                "LOCAL",
                "fs",
                "s1",
            )
        ],
        0,
    ),
    "removed": EventBatch(
        1234.5,
        [RemovedEvent([BIG], "GPU", 0), RemovedEvent([7], "STORAGE", 1, "REMOTE", "obj")],
        0,
    ),
    "cleared": EventBatch(1234.5, [ClearedEvent()], 0),
    "no rank": EventBatch(1234.5, []),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_batch_is_written_as_vllm_writes_it(name):
    assert encode_batch(BATCHES[name]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_batches_that_vllm_wrote_are_decoded(name):
    assert decode_batch(bytes.fromhex(GOLDEN[name])) == BATCHES[name]


def packed(*events):
    return msgspec.msgpack.encode([2.0, list(events), 1])


def test_events_written_as_arrays_are_decoded():
    batch = decode_batch(
        packed(
            ["BlockStored", [5], None, [1, 2], 2, None],
            ["BlockStored", [6], 5, [3, 4], 2, None, "CPU_PINNED", "poet"],
            ["BlockRemoved", [6, 5]],
            ["BlockRemoved", [7], "CPU", 3],
            ["AllBlocksCleared"],
        )
    )
    assert batch.events == [
        StoredEvent([5], None, [1, 2], 2, None, None, None),
        StoredEvent([6], 5, [3, 4], 2, None, "CPU_PINNED", "poet"),
        RemovedEvent([6, 5], None),
        RemovedEvent([7], "CPU", 3),
        ClearedEvent(),
    ]
    assert (batch.time_s, batch.rank) == (2.0, 1)


def test_fields_of_a_newer_version_are_passed_over_and_of_its_types_the_name_is_kept():
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "heat": 3}
    batch = decode_batch(packed(removed, {"type": "BlockMoved", "from": 1}, ["BlockHeated", 2]))
    assert batch.events == [
        RemovedEvent([1], "GPU"),
        UnknownEvent("BlockMoved"),
        UnknownEvent("BlockHeated"),
    ]
    longer = msgspec.msgpack.encode([2.0, [removed], 1, "more"])
    assert decode_batch(longer).events == [RemovedEvent([1], "GPU")]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 5]),
        msgspec.msgpack.encode(["late", []]),
        packed(3),
        packed([]),
        packed({"type": []}),
        packed({"type": "BlockStored"}),
        packed({"type": "BlockRemoved", "block_hashes": "all", "medium": None}),
    ],
)
def test_a_message_that_is_no_batch_is_refused_with_its_length(payload):
    with pytest.raises(RecordError, match=f"a message of {len(payload)} bytes"):
        decode_batch(payload)


def salted(parent, *hashes):
    """Return an event as SGLang 0.5.23 writes it; without an adapter it leaves out `lora_name`."""
    return {
        "type": "BlockStored",
        "block_hashes": [*hashes],
        "parent_block_hash": parent,
        "token_ids": [*range(2 * len(hashes))],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": "a tenant",
        "session_id": "s",
    }


@pytest.mark.parametrize("more", [{}, {"lora_name": "writer"}])
def test_a_salt_of_sglang_stands_where_vllm_has_it(more):
    events = [salted(None, -5, 6) | more, salted(6, 7) | more]
    first, second = decode_batch(msgspec.msgpack.encode([1.0, events, 0])).events
    assert (first.block_hashes, first.extra_keys) == ([-5, 6], [["a tenant"], None])
    assert (second.parent_block_hash, second.extra_keys) == (6, None)
    assert b"cache_salt" not in encode_batch(EventBatch(1.0, [first, second], 0))


def test_a_salted_prompt_of_sglang_is_found_under_its_salt_alone():
    mirror = Mirror()
    mirror.receive(decode_batch(msgspec.msgpack.encode([1.0, [salted(None, 1, 2)], 0])))
    salts = [], [["a tenant"]], [["another"]]
    assert [mirror.lookup(range(4), extra_keys=each) for each in salts] == [0, 4, 0]


def test_a_digest_is_the_number_of_its_low_64_bits():
    digest = block_hashes([1, 2, 3, 4], 4)[0]
    assert wire_hash(digest) == int.from_bytes(digest, "big") & (2**64 - 1)
