"""Records of an attacker who can write to a tier and has no key: every checksum holds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from quire.tiers.format import (
    HEADER_BYTES,
    KEY_BYTES,
    KEY_ID_AT,
    KEY_OFFSET,
    MAC_AT,
    MAC_END,
    TAG_AT,
    payload_of,
    read_header,
    seal,
)
from quire.tiers.keys import TierKey

CHECKSUM_AT = 40


class Attack(NamedTuple):
    """The material of an attacker without the tier key.

    `own`       the record that is to be replaced
    `other`     signed with the same key, under another name, with the same size
    `stranger`  a key that the stack does not read
    """

    own: bytes
    other: bytes
    stranger: TierKey


def forged(chance: Random, attack: Attack) -> bytes:
    """Return a record that is not `attack.own`, has its size, and of which every checksum holds."""
    while True:
        record = chance.choice(FORGERIES)(chance, attack)
        if record != attack.own:
            return record


def summed(record: bytearray) -> bytes:
    """Return a record with checksums as they should be."""
    for at, end, start, stop in (
        (CHECKSUM_AT, CHECKSUM_AT + 8, HEADER_BYTES, len(record)),
        (TAG_AT, HEADER_BYTES, 0, TAG_AT),
    ):
        digest = xxhash.xxh3_64_intdigest(bytes(record[start:stop]))
        record[at:end] = digest.to_bytes(8, "little")
    return bytes(record)


def bytes_change(chance: Random, attack: Attack) -> bytes:
    """Other bytes in the header, or in the payload."""
    changed = bytearray(attack.own)
    start, stop = chance.choice(((0, HEADER_BYTES), (HEADER_BYTES, len(changed))))
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(start, stop) if stop > start else 0] ^= chance.randrange(1, 256)
    return summed(changed)


def payload_is_of_another(_: Random, attack: Attack) -> bytes:
    """The header of the record, and the payload of another."""
    return summed(bytearray(attack.own[:HEADER_BYTES] + attack.other[HEADER_BYTES:]))


def is_replayed_under_this_key(chance: Random, attack: Attack) -> bytes:
    """A signed record of another key, which says that it is of this one; or does not."""
    changed = bytearray(attack.other)
    if chance.random() < 0.5:
        end = KEY_OFFSET + KEY_BYTES
        changed[KEY_OFFSET:end] = attack.own[KEY_OFFSET:end]
    return summed(changed)


def has_no_mac(chance: Random, attack: Attack) -> bytes:
    """Zeros for the key id, the MAC, or both, over the payload of the record or of another."""
    body = chance.choice((attack.own, attack.other))[HEADER_BYTES:]
    changed = bytearray(attack.own[:HEADER_BYTES] + body)
    start, stop = chance.choice(((KEY_ID_AT, MAC_AT), (MAC_AT, MAC_END), (KEY_ID_AT, MAC_END)))
    changed[start:stop] = bytes(stop - start)
    return summed(changed)


def names_another_tier_key(_: Random, attack: Attack) -> bytes:
    """The id of the attacker's key over the MAC of the record."""
    changed = bytearray(attack.own)
    changed[KEY_ID_AT:MAC_AT] = attack.stranger.write_id
    return summed(changed)


def is_signed_by_a_stranger(chance: Random, attack: Attack) -> bytes:
    """Sealed with another key; at times with the id of the key that the attacker lacks."""
    made = bytearray(attack.own)
    header = read_header(attack.own)
    payload_of(memoryview(made), header.payload_bytes)[:] = chance.randbytes(header.payload_bytes)
    seal(memoryview(made), header, chance.choice((attack.stranger, None)))
    if chance.random() < 0.5:
        made[KEY_ID_AT:MAC_AT] = attack.own[KEY_ID_AT:MAC_AT]
    return summed(made)


def is_not_a_number(chance: Random, attack: Attack) -> bytes:
    """NaN all over, under the header of the record or one of the attacker's."""
    made = bytearray(attack.own)
    payload_bytes = read_header(attack.own).payload_bytes
    nan = np.full(-(-payload_bytes // 4), np.nan, "<f4").tobytes()[:payload_bytes]
    made[HEADER_BYTES : HEADER_BYTES + payload_bytes] = nan
    if chance.random() < 0.5:
        header = msgspec.structs.replace(read_header(attack.own), generation=chance.getrandbits(63))
        seal(memoryview(made), header)
    return summed(made)


FORGERIES: tuple[Callable[[Random, Attack], bytes], ...] = (
    bytes_change,
    payload_is_of_another,
    is_replayed_under_this_key,
    has_no_mac,
    names_another_tier_key,
    is_signed_by_a_stranger,
    is_not_a_number,
)
