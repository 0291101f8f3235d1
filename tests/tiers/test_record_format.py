"""The record format is published: the golden files never change."""

import json
import struct
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest
import xxhash

from quire.errors import ConfigError, RecordError
from quire.tiers.format import (
    HEADER_BYTES,
    DType,
    Header,
    Namespace,
    carries,
    is_signed,
    new_buffer,
    payload_of,
    read_header,
    record_bytes,
    seal,
    verify,
)
from quire.tiers.keys import TierKey
from quire.tiers.stack.member import BufferPool

FOLDER = Path(__file__).parent.parent / "golden" / "records"
CASES = json.loads((FOLDER / "records.json").read_text(encoding="utf-8"))
WRITTEN = sorted(set(CASES) - {"later_minor", "later_major", "signed_later_minor"})
KEY = bytes(range(32))


def golden(name):
    return (FOLDER / f"{name}.quire").read_bytes()


def space_of(case):
    fields = case["namespace"]
    return Namespace(
        fields["model"],
        fields["dtype"],
        fields["block_size"],
        fields["layout"],
        tuple(fields["layers"]),
        tuple(fields["heads"]),
    )


def header_of(case):
    space = space_of(case)
    return Header(
        key=space.key(bytes.fromhex(case["block_hash"])),
        fingerprint=space.digest,
        payload_bytes=case["payload_bytes"],
        token_count=case["token_count"],
        group=case["group"],
        dtype=DType(case["dtype"]),
        generation=case["generation"],
    )


def signer_of(case):
    return TierKey(bytes.fromhex(case["secret"])) if "secret" in case else None


def small_record(payload_bytes=40):
    record = new_buffer(record_bytes(payload_bytes))
    payload_of(record, payload_bytes)[:] = bytes(range(payload_bytes))
    seal(record, Header(KEY, KEY, payload_bytes, 16))
    return record


@pytest.mark.parametrize("name", WRITTEN)
def test_sealing_writes_the_golden_bytes(name):
    case = CASES[name]
    record = memoryview(bytearray(b"\xff" * len(golden(name))))
    payload_of(record, case["payload_bytes"])[:] = bytes(
        i * 7 % 251 for i in range(case["payload_bytes"])
    )
    seal(record, header_of(case), signer_of(case))
    assert bytes(record) == golden(name)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"later_major"}))
def test_a_golden_file_reads_as_what_was_written(name):
    assert verify(golden(name)) == header_of(CASES[name])
    record = memoryview(golden(name))
    assert carries(record, header_of(CASES[name]).key)
    signer = signer_of(CASES[name])
    assert is_signed(record, signer or TierKey(KEY)) is (True if signer else None)


def test_a_later_minor_version_is_read_and_a_later_major_one_is_foreign():
    assert verify(golden("later_minor")) == verify(golden("plain"))
    with pytest.raises(RecordError, match="version 3 of the record format; this reader knows 2"):
        verify(golden("later_major"))
    with pytest.raises(RecordError) as caught:
        read_header(golden("later_major"))
    assert caught.value.is_foreign


@pytest.mark.parametrize("name", WRITTEN)
def test_every_field_of_the_header_lies_where_the_table_says(name):
    case, record = CASES[name], golden(name)
    space = space_of(case)

    def number(start, size):
        return int.from_bytes(record[start : start + size], "little")

    assert record[:8] == b"quire-kv"
    assert [number(8 + 2 * i, 2) for i in range(4)] == [2, 0, case["group"], case["dtype"]]
    assert [number(16, 4), number(20, 4)] == [case["token_count"], 0]
    assert [number(24, 8), number(32, 8)] == [case["payload_bytes"], case["generation"]]
    assert record[48:80] == space.digest
    assert record[80:112] == space.key(bytes.fromhex(case["block_hash"]))
    mac = bytes(40)
    if "secret" in case:
        secret = {"key": bytes.fromhex(case["secret"])}
        key_id = blake2b(**secret, digest_size=8, person=b"quire-key-id").digest()
        signed = record[:112] + key_id + bytes(32) + record[192:]
        mac = (
            key_id + blake2b(signed, **secret, digest_size=32, person=b"quire-record-mac").digest()
        )
    assert record[112:152] == mac
    assert number(152, 32) == 0
    assert record[HEADER_BYTES + case["payload_bytes"] :].strip(b"\0") == b""
    assert len(record) % (4096 if len(record) >= 65536 else 64) == 0


@pytest.mark.parametrize("payload_bytes", [0, 1, 40, 64])
def test_every_bit_flip_of_a_record_is_refused(payload_bytes):
    record = bytearray(small_record(payload_bytes))
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError):
            verify(record)
        assert not carries(memoryview(record), KEY)
        record[bit // 8] ^= 1 << bit % 8
    assert verify(record).key == KEY
    assert carries(memoryview(record), KEY)
    assert not carries(memoryview(record), bytes(32))


def test_a_sound_header_is_not_enough():
    for at, field in ((8, "<H"), (14, "<H"), (24, "<Q")):  # major, dtype, length; sealed again
        record = bytearray(small_record())
        struct.pack_into(field, record, at, 99)
        checksum = xxhash.xxh3_64_intdigest(record[:184])
        struct.pack_into("<Q", record, 184, checksum)
        with pytest.raises(RecordError):
            verify(record)
        assert not carries(memoryview(record), KEY)


def test_every_other_length_of_a_record_is_refused():
    record = bytes(small_record()) + bytes(200)
    size = record_bytes(40)
    for length in (*range(size), *range(size + 1, len(record))):
        with pytest.raises(RecordError):
            verify(record[:length])
        assert not carries(memoryview(record)[:length], KEY)


@pytest.mark.parametrize(
    ("payload_bytes", "size"),
    [
        (0, 192),
        (1, 256),
        (64, 256),
        (65, 320),
        (65_280, 65_472),
        (65_281, 65_536),
        (65_344, 65_536),
        (65_345, 69_632),
        (1 << 20, 1_052_672),
    ],
)
def test_a_record_takes_whole_lines_and_from_64_kib_whole_pages(payload_bytes, size):
    assert record_bytes(payload_bytes) == size


def test_a_buffer_of_another_size_or_a_short_key_is_refused_and_left_alone():
    record = new_buffer(record_bytes(40))
    with pytest.raises(ConfigError, match="takes 320; the buffer has 256"):
        seal(record, Header(KEY, KEY, 100, 16))
    with pytest.raises(ConfigError, match="take 32 bytes, got 31 and 32"):
        seal(record, Header(KEY[:31], KEY, 40, 16))
    assert not any(record)


def test_sealing_zeros_what_was_behind_the_payload():
    record = memoryview(bytearray(b"\xff" * record_bytes(40)))
    seal(record, Header(KEY, KEY, 40, 16))
    assert not any(record[HEADER_BYTES + 40 :])


def test_no_two_namespaces_share_a_digest():
    plain = {"model": "ab", "dtype": "c", "block_size": 16, "layout": "d", "layers": (1, 2)}
    changes = [
        {},
        {"model": "a", "dtype": "bc"},
        {"dtype": "cd", "layout": ""},
        {"block_size": 1},
        {"layers": (12,)},
        {"layers": ()},
        {"heads": (0, 8)},
        {"heads": (0, 80)},
    ]
    spaces = [Namespace(**({"heads": (0, 0)} | plain | change)) for change in changes]
    assert len({space.digest for space in spaces}) == len(spaces)


@pytest.mark.cases(1)
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no huge pages here"
)
@pytest.mark.parametrize("make", ["new_buffer(size)", "BufferPool(0).take([size])[0]"])
def test_a_large_buffer_asks_for_huge_pages_and_a_small_one_does_not(make):
    script = f"""
from pathlib import Path
import re
import numpy as np
from {BufferPool.__module__} import BufferPool
from quire.tiers.format import new_buffer, record_bytes

def asks(size):
    buffer = {make}
    at, is_here = np.frombuffer(buffer, np.uint8).ctypes.data, False
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(match[1], 16) <= at < int(match[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError

assert not asks(record_bytes(1 << 10))
assert asks(record_bytes(256 << 10))
"""
    # In a process of its own: elsewhere a small buffer may lie where a large array had asked.
    subprocess.run([sys.executable, "-c", script], check=True)
