"""One flipped bit in a disk tier's files: what was deleted stays so, and what is there is right or lost."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, names_of, record_of
from quire.tiers.disk import Disk
from quire.tiers.disk.index_file import ROW_BYTES
from quire.tiers.format import HEADER_BYTES, record_bytes

KEYS = names_of(range(10))
PAYLOADS = (500, 1000)
CAPACITY = 9 * record_bytes(1000)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "delete", "reopen"]),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
        st.sampled_from(PAYLOADS),
    ),
    min_size=3,
    max_size=12,
)


def lived(path, steps):
    """Live through a history; return the payload size of what is held, and the keys that were deleted."""
    held, gone = {}, set()
    tier = Disk(path, CAPACITY, direct=False, ahead=1)
    for step, keys, size in [("put", KEYS[:6], 1000), *steps]:
        if step == "put":
            outcomes = tier.put(keys, [record_of(key, size) for key in keys], 60)
            stored = (Outcome.STORED, Outcome.PRESENT)
            there = [key for key, each in zip(keys, outcomes, strict=True) if each in stored]
            held |= dict.fromkeys(there, size)
            gone -= set(there)
        elif step == "delete":
            tier.delete(keys)
            gone |= set(keys)
            held = {key: size for key, size in held.items() if key not in gone}
        else:
            tier.close()
            tier = Disk(path, CAPACITY, direct=False, ahead=1)
    here = {entry.key for entry in tier.scan()}
    tier.close()
    return {key: size for key, size in held.items() if key in here}, gone


def found(tier, held):
    """Return the outcome of each key that is held; what is found is right."""
    records = [record_of(key, size) for key, size in held.items()]
    buffers = buffers_like(records)
    outcomes = tier.get(list(held), buffers, 60)
    for outcome, buffer, record in zip(outcomes, buffers, records, strict=True):
        assert outcome is not Outcome.HIT or buffer == record
    return outcomes


def assert_gone(tier, gone):
    for size in PAYLOADS:
        records = [record_of(key, size) for key in gone]
        assert set(tier.get(list(gone), buffers_like(records), 60)) <= {Outcome.ABSENT}


def flips_of(path, random, each):
    """Yield file and bit: so many of each row of the indexes and each header of the slabs, None: all."""
    for file in sorted(path.glob("*.quire")):
        is_index = file.name.startswith("index")
        step = ROW_BYTES if is_index else int(file.name.split("-")[1].split(".")[0])
        for start in range(0, file.stat().st_size, step):
            bits = range(8 * (ROW_BYTES if is_index else HEADER_BYTES))
            for bit in bits if each is None else random.sample(bits, each):
                yield file, 8 * start + bit


@pytest.mark.ci
@pytest.mark.parametrize(
    ("examples", "each"), [(4, 3), pytest.param(60, None, marks=pytest.mark.long)]
)
def test_a_flipped_bit_brings_no_deleted_record_back(examples, each):
    @settings(max_examples=examples, deadline=None)
    @given(steps=STEPS, random=st.randoms(use_true_random=False))
    def check(steps, random):
        root = Path(tempfile.mkdtemp(prefix="quire-flips-"))
        try:
            path = root / "disk"
            held, gone = lived(path, steps)
            for number, (file, bit) in enumerate(flips_of(path, random, each)):
                whole = file.read_bytes()
                at, mask = bit // 8, 1 << bit % 8
                is_zero = file.name.startswith("index") and not any(
                    whole[at // ROW_BYTES * ROW_BYTES :][:ROW_BYTES]
                )
                file.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
                with Disk(path, read_only=True) as tier:
                    assert_gone(tier, gone)
                    outcomes = found(tier, held)
                    assert outcomes.count(Outcome.HIT) >= len(held) - 1
                    assert not is_zero or (tier.recovered.is_clean and tier.recovered.num_lost == 0)
                if not number % 50:  # one that may mend it
                    copied = root / f"copied-{number}"
                    shutil.copytree(path, copied)
                    for _ in range(2):
                        with Disk(copied, CAPACITY, direct=False, ahead=1) as tier:
                            assert_gone(tier, gone)
                            found(tier, held)
                            tier.check()
                file.write_bytes(whole)
        finally:
            shutil.rmtree(root)

    check()
