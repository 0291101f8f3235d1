"""A tier key: nothing that it did not sign is accepted, whatever the bytes; and it is shown to nobody."""

import copy
import logging
import os
import pickle
import random
from hashlib import sha256

import msgspec
import numpy as np
import pytest

from forging import Attack, forged, summed
from quire.engines.tiered.opening import open_stack
from quire.errors import ConfigError, RecordError
from quire.tiers import Disk, Files, Host, StackSettings, TierKey, TierSettings, TierStack
from quire.tiers.base import Outcome, checked
from quire.tiers.contract.poisoned import OWN, STRANGER, signed_of
from quire.tiers.contract.samples import name_of, names_of, record_of
from quire.tiers.format import KEY_ID_AT, MAC_AT, read_header, record_bytes, seal
from quire.tiers.keys import new_secret
from quire.tiers.trust import DOUBT_S, Trust

SIZES = (0, 1, 64, 500, 1_000, 4_000)
SECRET, OLDER, TENANTS = (sha256(each).digest() for each in (b"secret", b"older", b"tenants"))
HIT, STORED, PRESENT = Outcome.HIT, Outcome.STORED, Outcome.PRESENT
UNTRUSTED, FORGED, SKIPPED = Outcome.UNTRUSTED, Outcome.FORGED, Outcome.SKIPPED


def judged(key, record, trust):
    """Return what a tier makes of bytes that were found under a key."""
    outcome = checked(key, memoryview(record))
    return trust.judge(memoryview(record)) if outcome is HIT else outcome


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_the_codec_accepts_no_record_that_the_key_did_not_sign(count):
    chance = random.Random(count)
    trust = Trust(TierKey(SECRET, [OLDER]))
    stranger = TierKey(sha256(b"stranger").digest(), [sha256(b"stranger 2").digest()])
    pairs = []
    for size in SIZES:
        for secret in (SECRET, OLDER):  # one written with, one only read
            own, other = names_of((size, size + 10_000))
            signer = TierKey(secret)
            pairs.append(
                (own, bytes(signed_of(own, signer, size)), bytes(signed_of(other, signer, size)))
            )
    assert all(judged(key, own, trust) is HIT for key, own, _ in pairs)
    refused = set()
    for _ in range(count):
        key, own, other = chance.choice(pairs)
        record = forged(chance, Attack(own, other, stranger))
        if chance.random() < 0.05:  # cut off or longer, checksums mended where a header is left
            size = chance.choice((0, 1, 191, 192, len(record) - 64, len(record) + 64))
            record = (record + bytes(64))[:size]
            record = summed(bytearray(record)) if size >= 192 else record
        outcome = judged(key, record, trust)
        assert outcome is not HIT
        refused.add(outcome)
    assert refused >= {UNTRUSTED, FORGED, Outcome.CORRUPT, Outcome.FOREIGN}


def test_records_of_older_keys_are_read_and_new_ones_are_signed_with_the_first():
    trust = Trust(TierKey(SECRET, [OLDER]))
    assert trust.judge(signed_of(name_of(1), TierKey(OLDER))) is HIT
    assert Trust(TierKey(SECRET)).judge(signed_of(name_of(1), TierKey(OLDER))) is UNTRUSTED
    record = signed_of(name_of(1), trust.key)
    assert bytes(record[KEY_ID_AT:MAC_AT]) == TierKey(SECRET).write_id


@pytest.mark.parametrize("below", ["disk", "files"])
def test_a_prefix_that_was_poisoned_is_put_anew(tmp_path, below):
    """A record without a signature under a key that is being computed does not keep the key from being stored."""

    def opened():
        return Disk(tmp_path / "kv", "1MiB") if below == "disk" else Files(tmp_path / "kv")

    keys, nan = names_of(range(4)), np.full(250, np.nan, "<f4").tobytes()
    with opened() as tier:
        for key in keys[:2]:
            record = record_of(key)
            record[192:1192] = nan
            seal(record, read_header(record), STRANGER if key is keys[0] else None)
            assert tier.put([key], [record]) == [STORED]
    sizes = [record_bytes(1000)] * 4
    with TierStack([Host("1MiB"), opened()], StackSettings(key=OWN, gate=False)) as stack:
        assert stack.find(keys) == [1, 1, -1, -1]
        outcomes, buffers = stack.load(keys, sizes)
        assert outcomes[:2] == [UNTRUSTED, UNTRUSTED]
        assert buffers == [None] * 4
        assert stack.stats().tiers[1].loads["untrusted"] == 2
        assert stack.stats().loads["untrusted"] == 2
        assert stack.tiers[0].contains(keys) == [False] * 4, "nothing was promoted"
        assert stack.find(keys) == [-1] * 4
        stack.store(keys, [signed_of(key, OWN) for key in keys])
        assert stack.drain(10)
    with TierStack([opened()], StackSettings(key=OWN, gate=False)) as stack:
        outcomes, buffers = stack.load(keys, sizes)
        assert outcomes == [HIT] * 4
        assert buffers == [signed_of(key, OWN) for key in keys]


def test_an_unsigned_record_stays_until_its_key_is_put_and_a_forged_one_goes(tmp_path):
    keys = names_of(range(2))
    forgery = bytearray(signed_of(keys[1], OWN))
    forgery[MAC_AT] ^= 1
    with Files(tmp_path) as tier:
        tier.put(keys, [record_of(keys[0]), memoryview(bytearray(summed(forgery)))])
    with TierStack([Files(tmp_path)], StackSettings(key=OWN, gate=False)) as stack:
        outcomes, _ = stack.load(keys, [record_bytes(1000)] * 2)
        assert outcomes == [UNTRUSTED, FORGED]
    with Files(tmp_path) as tier:
        assert tier.contains(keys) == [True, False]


def test_without_a_key_signed_records_are_read_as_others_are(tmp_path):
    keys = names_of(range(2))
    with TierStack([Files(tmp_path)], StackSettings(gate=False)) as stack:
        stack.store(keys, [signed_of(keys[0], OWN), record_of(keys[1])])
        assert stack.drain(10)
        assert stack.load(keys, [record_bytes(1000)] * 2)[0] == [HIT, HIT]


def test_unsigned_victims_of_a_disk_reach_no_memory_below(tmp_path):
    keys = names_of(range(200))
    with Disk(tmp_path, 1216 * 100, ahead=1) as disk:
        disk.put(keys[:100], [record_of(key) for key in keys[:100]])
    settings = StackSettings(key=OWN, tiers={"host": TierSettings(write="back")})
    with TierStack([Disk(tmp_path, 1216 * 100, ahead=1), Host("1MiB")], settings) as stack:
        stack.store(keys[100:], [signed_of(key, OWN) for key in keys[100:]])
        assert stack.drain(10)
        host = stack.tiers[1]
        assert not any(host.contains(keys[:100]))


def test_a_tier_in_memory_keeps_what_it_had_only_if_the_key_signed_it():
    keys, host = names_of(range(3)), Host("1MiB")
    host.put(keys, [record_of(keys[0]), signed_of(keys[1], OWN), signed_of(keys[2], STRANGER)])
    with TierStack([host], StackSettings(key=OWN)) as stack:
        assert host.contains(keys) == [False, True, False]
        with pytest.raises(RecordError, match="not signed, for tiers of TierKey"):
            host.put(keys[:1], [record_of(keys[0])])
        with pytest.raises(ConfigError, match="is used with TierKey"):
            TierStack([host], StackSettings(key=STRANGER))
        with pytest.raises(RecordError, match=r"`stack\.settings\.key`"):
            stack.store(keys[:1], [record_of(keys[0])])
        with pytest.raises(RecordError, match="signed with"):
            stack.store_evicted(keys[:1], [signed_of(keys[0], STRANGER)])


def test_a_mac_is_computed_once_on_the_way_down_and_once_on_the_way_up(tmp_path, monkeypatch):
    counted = []
    mac = TierKey.mac
    monkeypatch.setattr(TierKey, "mac", lambda *words: counted.append(1) or mac(*words))
    keys = names_of(range(10))
    tiers = [Host("1MiB"), Disk(tmp_path / "disk", "1MiB"), Files(tmp_path / "files")]
    with TierStack(tiers, StackSettings(key=OWN, gate=False)) as stack:
        stack.store(keys, [signed_of(key, OWN) for key in keys])
        assert stack.drain(10)
        assert len(counted) == 10
        stack.load(keys, [record_bytes(1000)] * 10)
        assert len(counted) == 10, "memory needs none"
        stack.tiers[0].delete(keys)
        assert stack.load(keys, [record_bytes(1000)] * 10)[0] == [HIT] * 10
        assert stack.load(keys, [record_bytes(1000)] * 10)[0] == [HIT] * 10
        assert len(counted) == 20


def test_a_doubted_key_is_asked_for_again_after_a_while():
    now = [0.0]
    trust = Trust(OWN, lambda: now[0])
    keys = names_of(range(4))
    trust.note("disk", keys, [HIT, UNTRUSTED, FORGED, Outcome.ABSENT])
    assert trust.doubted(keys) == keys[1:3]
    now[0] = DOUBT_S
    assert trust.doubted(keys) == []


def test_others_records_are_a_warning_that_comes_less_and_less(caplog):
    trust = Trust(OWN)
    with caplog.at_level(logging.WARNING, "quire"):
        for _ in range(100):
            trust.note("disk", [name_of(1)], [UNTRUSTED])
    assert [each.args for each in caplog.records] == [("disk", 2**at) for at in range(7)]


# Secrets


def test_no_secret_is_shown_or_leaves_by_pickle():
    key = TierKey(SECRET, [OLDER], TENANTS)
    settings = StackSettings(key=key)
    shown = f"{key!r} {key} {settings!r}"
    for secret in (SECRET, OLDER, TENANTS):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
    assert key.write_id.hex() in repr(key)
    assert copy.deepcopy(settings) == settings == copy.copy(settings)
    with pytest.raises(ConfigError, match="`key_file`"):
        pickle.dumps(settings)
    with pytest.raises(TypeError):
        msgspec.json.encode(settings)


@pytest.mark.parametrize(
    ("write", "read", "words"),
    [
        (b"short", (), "32 bytes, number 1 is of 5"),
        (SECRET, (b"x" * 33,), "number 2 is of 33"),
        ("a" * 32, (), "number 1 is of str"),
        (SECRET, (SECRET,), "given twice"),
    ],
)
def test_secrets_of_another_length_or_given_twice_are_refused(write, read, words):
    with pytest.raises(ConfigError, match=words):
        TierKey(write, read)


def written(tmp_path, text, mode=0o600):
    file = tmp_path / "tier.key"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_key_file_has_the_key_that_signs_first(tmp_path, caplog):
    text = f"# rotated\n{SECRET.hex()}  # newest\n\n{OLDER.hex()}\ntenants {TENANTS.hex()}\n"
    key = TierKey.from_file(written(tmp_path, text))
    assert key == TierKey(SECRET, [OLDER], TENANTS)
    assert (key.write_id, key.tenants) == (TierKey(SECRET).write_id, TENANTS)
    assert not caplog.records
    TierKey.from_file(written(tmp_path, text, 0o644))
    assert "chmod 600" in caplog.text
    assert SECRET.hex() not in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no tier key"),
        ("# nothing\n", "has no tier key"),
        (f"tenants {TENANTS.hex()}\n", "has no tier key"),
        (f"{SECRET.hex()}\n{SECRET.hex()[:-2]}\n", "line 2 of"),
        (f"{SECRET.hex()[:-1]}z\n", "line 1 of"),
        (f"{SECRET.hex()} {OLDER.hex()}\n", "line 1 of"),
        (f"{SECRET.hex()}\ntenants\n", "line 2 of"),
        (f"{SECRET.hex()}\n{SECRET.hex()}\n", "twice"),
        (f"{SECRET.hex()}\ntenants {SECRET.hex()}\n", "twice"),
        (f"{SECRET.hex()}\ntenants {TENANTS.hex()}\ntenants {OLDER.hex()}\n", "2 lines"),
    ],
)
def test_an_invalid_key_file_is_refused_without_showing_its_content(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        TierKey.from_file(written(tmp_path, text))
    for secret in (SECRET, OLDER, TENANTS):
        assert secret.hex()[:8] not in str(caught.value)


def test_a_key_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*tier\.key"):
        TierKey.from_file(tmp_path / "tier.key")


def test_settings_as_text_name_a_file_and_hold_no_key(tmp_path):
    file = written(tmp_path, f"{SECRET.hex()}\n")
    with open_stack(["host:1MiB"], {"key_file": str(file), "gate": False}) as stack:
        assert stack.settings.key == TierKey(SECRET)
        assert not stack.settings.gate
    for given in ({"key": SECRET.hex()}, {"key": SECRET}):
        with pytest.raises(ConfigError, match="logs, process lists and errors show") as caught:
            open_stack(["host:1MiB"], given)
        assert SECRET.hex() not in str(caught.value)
    with pytest.raises(ConfigError, match="path of a file, got int"):
        open_stack(["host:1MiB"], {"key_file": 7})


def test_new_secrets_are_distinct_hexadecimal_texts():
    made = {new_secret() for _ in range(10)}
    assert len(made) == 10
    assert {len(each) for each in made} == {64}
    assert os.path.sep not in "".join(made)
