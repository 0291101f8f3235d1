"""Prefixes as safetensors files: what is in them, what comes back, and what is refused."""

import json

import msgspec
import numpy as np
import pytest
from dict_tier import DictTier
from prefixes_help import (
    FULL,
    QUANTIZED,
    STATES,
    book_of,
    hashes_of,
    payload_for,
    sealed,
    store,
)

from quire import Scope
from quire.errors import RecordError, TierError
from quire.tiers.contents import portable
from quire.tiers.contents.batches import batches, carved
from quire.tiers.contents.names import NameBook
from quire.tiers.contents.portable import export_records, import_records

PROMPT = list(range(40))


@pytest.fixture
def tier():
    """Ten blocks in a full group, the same quantized, and two snapshots of states."""
    held = DictTier("source")
    blocks = hashes_of(PROMPT)
    store(held, FULL, blocks[::-1])
    store(held, STATES, blocks[4::5], group=1)
    store(held, QUANTIZED, blocks)
    return held


@pytest.fixture
def names():
    return book_of([FULL, STATES, QUANTIZED], [(PROMPT, None)])


@pytest.fixture
def file(tier, names, tmp_path):
    path = tmp_path / "prefixes.safetensors"
    export_records(tier, path, names)
    return path


def parts_of(path):
    safe_open = pytest.importorskip("safetensors").safe_open
    with safe_open(path, "numpy") as held:
        parts = json.loads(held.metadata()["parts"])
        return {part["fingerprint"]: (str(index), part) for index, part in enumerate(parts)}


def rewritten(path, change):
    """Change the JSON of a file and keep its data."""
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:stop])
    change(head)
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[stop:])
    return path


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def begin_of(path, name):
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    return stop + json.loads(data[8:stop])[name]["data_offsets"][0]


def test_every_record_comes_back_as_it_was(tier, file):
    target = DictTier()
    done = import_records(file, target)
    assert target.records == tier.records
    assert done.num_records == 22
    assert done.outcomes == {"stored": 22}
    assert done.num_bytes == sum(map(len, tier.records.values()))


def test_names_come_along(file, names):
    found = import_records(file, DictTier()).names
    assert found.namespaces == names.namespaces
    assert found.parents == names.parents
    assert found.scopes == names.scopes


def test_other_libraries_find_the_kv_of_each_layer_by_its_name(file):
    safe_open = pytest.importorskip("safetensors").safe_open
    part, _ = parts_of(file)[FULL.digest.hex()]
    with safe_open(file, "numpy") as held:
        hashes = held.get_tensor(f"{part}.hashes")
        k, v = (held.get_tensor(f"{part}.layers.2.{name}") for name in "kv")
    blocks = hashes_of(PROMPT)
    assert [bytes(row) for row in hashes] == blocks
    assert (k.dtype, k.shape, v.shape) == (np.float16, (10, 4, 2, 3), (10, 4, 2, 5))
    payload = payload_for(FULL.key(blocks[6]), 256)
    assert k[6].tobytes() == payload[128:176]
    assert v[6].tobytes() == payload[176:256]


def test_states_are_tensors_of_their_own_dtypes(file):
    torch_file = pytest.importorskip("safetensors.torch")
    tensors = torch_file.load_file(file)
    part, said = parts_of(file)[STATES.digest.hex()]
    assert said["group"] == 1
    shapes = {
        name.removeprefix(f"{part}."): (str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
        if name.startswith(f"{part}.layers")
    }
    assert shapes == {
        "layers.1.conv": ("torch.bfloat16", (2, 3, 5)),
        "layers.1.sum": ("torch.float32", (2, 2, 4)),
        "layers.3.count": ("torch.float32", (2,)),
    }


def test_quantized_numbers_are_bytes(file):
    part, _ = parts_of(file)[QUANTIZED.digest.hex()]
    safe_open = pytest.importorskip("safetensors").safe_open
    with safe_open(file, "numpy") as held:
        assert held.get_tensor(f"{part}.payloads").shape == (10, 200)


def test_without_names_records_are_bytes_and_come_back_all_the_same(tier, tmp_path):
    done = export_records(tier, tmp_path / "bare.safetensors")
    assert [part.namespace for part in done.parts] == [None, None, None]
    target = DictTier()
    import_records(tmp_path / "bare.safetensors", target)
    assert target.records == tier.records


def test_an_export_is_the_same_file_whatever_the_order_in_the_tier(tier, names, file, tmp_path):
    tier.records = dict(sorted(tier.records.items()))
    export_records(tier, tmp_path / "again", names)
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_only_what_is_wanted_is_written_and_named(tier, tmp_path, names):
    path = tmp_path / "some.safetensors"
    other = hashes_of([9] * 8, Scope(salt="b"))
    names.add_blocks(b"\1" * 32, other)
    done = export_records(tier, path, names, lambda header: header.fingerprint == STATES.digest)
    assert done.num_records == 2
    found = import_records(path, DictTier()).names
    assert list(found.namespaces.values()) == [STATES]
    assert set(found.parents) == set(hashes_of(PROMPT)[4::5])


def test_many_batches_are_as_one(tier, names, file, tmp_path, monkeypatch):
    monkeypatch.setattr("quire.tiers.contents.portable.BATCH_BYTES", 1000)
    export_records(tier, tmp_path / "again", names)
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    target = DictTier()
    steps = []
    import_records(tmp_path / "again", target, progress=lambda *each: steps.append(each))
    assert target.records == tier.records
    assert steps[-1] == (44, 44)
    assert len(steps) > 10


def test_what_is_imported_last_is_a_prompts_head(file, monkeypatch):
    monkeypatch.setattr("quire.tiers.contents.portable.BATCH_BYTES", 1000)
    target = DictTier()
    batches = []
    put = target.put
    target.put = lambda keys, *rest: (batches.append(list(keys)), put(keys, *rest))[1]
    import_records(file, target)
    order = [key for batch in batches[::-1] for key in batch]
    blocks = hashes_of(PROMPT)
    for namespace in (FULL, QUANTIZED):
        places = [order.index(namespace.key(block)) for block in blocks]
        assert places == sorted(places)


def test_a_damaged_record_is_left_out_and_counted(tier, names, tmp_path):
    key = FULL.key(hashes_of(PROMPT)[3])
    record = bytearray(tier.records[key])
    record[200] ^= 1
    tier.records[key] = bytes(record)
    done = export_records(tier, tmp_path / "rest.safetensors", names)
    assert (done.num_records, done.num_left_out) == (21, 1)


def test_nothing_to_export_is_said_and_no_file_is_left(tmp_path):
    with pytest.raises(TierError, match="no records to export"):
        export_records(DictTier(), tmp_path / "none.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_records_that_go_meanwhile_leave_the_old_file(tier, names, file, tmp_path, monkeypatch):
    before = file.read_bytes()
    sort = portable.parts_of
    monkeypatch.setattr(portable, "parts_of", lambda *each: tier.records.clear() or sort(*each))
    with pytest.raises(TierError, match="were gone"):
        export_records(tier, file, names)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_place_that_cannot_be_written_is_said(tier, tmp_path):
    with pytest.raises(TierError, match="cannot write"):
        export_records(tier, tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize("name", ["0.headers", "0.hashes", "1.headers", "2.layers.2.v"])
def test_any_byte_that_is_not_right_is_refused_before_anything_is_stored(file, name):
    names = [name]
    if name == "2.layers.2.v":
        part, _ = parts_of(file)[FULL.digest.hex()]
        names = [f"{part}.layers.2.v"]
    target = DictTier()
    flip(file, begin_of(file, names[0]) + 70)
    with pytest.raises(RecordError):
        import_records(file, target)
    assert target.records == {}


def test_a_good_record_under_another_name_is_refused(tier, file):
    part, _ = parts_of(file)[FULL.digest.hex()]
    at = begin_of(file, f"{part}.hashes")
    data = bytearray(file.read_bytes())
    data[at : at + 32], data[at + 32 : at + 64] = data[at + 32 : at + 64], data[at : at + 32]
    file.write_bytes(data)
    with pytest.raises(RecordError, match="block hash"):
        import_records(file, DictTier())


def test_a_record_that_stands_twice_is_refused(tmp_path):
    tier = DictTier()
    store(tier, FULL, hashes_of(range(8)))
    path = tmp_path / "twice.safetensors"
    export_records(tier, path)
    size = 128
    at = begin_of(path, "0.headers")
    data = bytearray(path.read_bytes())
    data[at + size : at + 2 * size] = data[at : at + size]
    payloads = begin_of(path, "0.payloads")
    data[payloads + 256 : payloads + 512] = data[payloads : payloads + 256]
    path.write_bytes(data)
    with pytest.raises(RecordError, match="two records of one key"):
        import_records(path, DictTier())


def test_a_namespace_that_was_changed_is_refused(file):
    def change(head):
        head["__metadata__"]["parts"] = head["__metadata__"]["parts"].replace("model-a", "model-b")

    with pytest.raises(RecordError, match="fingerprint"):
        import_records(rewritten(file, change), DictTier())


def test_another_models_records_are_refused_with_what_differs(file):
    ours = [msgspec.structs.replace(each, model="model-b") for each in (FULL, STATES)]
    with pytest.raises(RecordError, match=r"another kind than this cache's: model 'model-a'$"):
        import_records(file, DictTier(), [*ours, QUANTIZED])
    assert import_records(file, DictTier(), [FULL, STATES, QUANTIZED]).num_records == 22


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: head.pop("__metadata__"), "none that quire wrote"),
        (lambda head: head["__metadata__"].update(quire="2"), "version '2'"),
        (lambda head: head["__metadata__"].update(parts="[1]"), "not those of an export"),
        (lambda head: head["__metadata__"].update(parts="[]"), "its metadata speak of 0"),
        (lambda head: head["0.headers"].update(dtype="F8_E4M3"), "missing, or not U8"),
        (lambda head: head["0.headers"].update(dtype="I7"), "dtype 'I7'"),
        (lambda head: head["0.headers"].update(shape=[-1, -1]), "has"),
        (lambda head: head.update(other=head.pop("0.headers")), "missing"),
        (lambda head: head["0.headers"].update(data_offsets=[0, 1 << 60]), "has"),
        (
            lambda head: head.update(more={"dtype": "U8", "shape": [0], "data_offsets": [9, 9]}),
            "begin",
        ),
    ],
)
def test_a_file_whose_header_does_not_fit_is_refused(file, change, message):
    with pytest.raises(RecordError, match=message):
        import_records(rewritten(file, change), DictTier())


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 8 + b"{}", b"\2" + bytes(7) + b"[]", b"\2" + bytes(7) + b"{]"],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="no safetensors file"):
        import_records(path, DictTier())


def test_a_file_cut_anywhere_is_refused(file):
    data = file.read_bytes()
    for size in range(0, len(data), 97):
        file.write_bytes(data[:size])
        target = DictTier()
        with pytest.raises(RecordError):
            import_records(file, target)
        assert not target.records


def test_a_file_of_another_program_is_refused(tmp_path):
    numpy_file = pytest.importorskip("safetensors.numpy")
    numpy_file.save_file({"weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(RecordError, match="none that quire wrote"):
        import_records(tmp_path / "model.safetensors", DictTier())


def test_what_the_tier_has_already_stays(tier, file):
    target = DictTier()
    key, record = sealed(FULL, hashes_of(PROMPT)[0])
    target.put([key], [record])
    done = import_records(file, target)
    assert done.outcomes == {"present": 1, "stored": 21}


def test_a_book_without_names_knows_nothing():
    assert NameBook().keys() == {}


def test_buffers_of_one_piece_are_apart_and_large_ones_lie_on_pages():
    sizes = [128, 70_000 // 4096 * 4096 + 4096, 64, 0, 1 << 20, 192]
    buffers = carved(sizes)
    assert list(map(len, buffers)) == sizes
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number + 1]) * len(buffer)
    assert [set(buffer) for buffer in buffers] == [{1}, {2}, {3}, set(), {5}, {6}]
    for index in (1, 4):
        assert np.frombuffer(buffers[index], np.uint8).ctypes.data % 4096 == 0


def test_batches_are_bounded_in_bytes_and_in_number(monkeypatch):
    monkeypatch.setattr("quire.tiers.contents.batches.BATCH_RECORDS", 3)
    found = list(batches("abcdefgh", [1, 1, 1, 1, 9, 30, 1, 1], 10))
    assert found == [(3, "abc"), (5, "de"), (6, "f"), (8, "gh")]
    assert list(batches("", [])) == []


def test_no_change_of_a_file_stores_anything_that_was_not_exported(tier, file):
    """Bits turned, bytes replaced, runs cut out, doubled or swapped: a seed each."""
    data = file.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    for seed in range(400):
        random = np.random.default_rng(seed)
        changed = bytearray(data)
        # Half of the changes go into the JSON, a sixth of the file.
        limit = stop if seed % 2 else len(data)
        for _ in range(random.integers(1, 4)):
            one, two = sorted(random.integers(0, limit, 2).tolist())
            match random.integers(0, 5):
                case 0:
                    changed[one] ^= 1 << int(random.integers(0, 8))
                case 1:
                    changed[one] = int(random.integers(0, 256))
                case 2:
                    del changed[one : min(two, one + 40)]
                case 3:
                    changed[one:one] = changed[one : min(two, one + 40)]
                case _:
                    changed[one : one + 8], changed[two : two + 8] = (
                        changed[two : two + 8],
                        changed[one : one + 8],
                    )
        file.write_bytes(changed)
        target = DictTier()
        try:
            import_records(file, target)
        except RecordError:
            assert not target.records
        assert target.records.items() <= tier.records.items()
