"""The names beside a tier's records: written, read, and of no harm where they are damaged."""

import json
import os
import threading
from collections import Counter
from hashlib import sha256
from random import Random

import msgspec
import pytest
from prefixes_help import FULL, STATES, book_of, hashes_of

import quire.tiers.contents.names as names_module
from quire import Scope
from quire.errors import TierError
from quire.exchange.hashing import root_digest, tag_of
from quire.tiers.contents.names import (
    FILE_NAME,
    TRIES,
    ChainName,
    NameBook,
    NamesFile,
    NamespaceName,
    ScopeName,
    purge_names,
    write_names,
)
from quire.tiers.format import Namespace, record_key

ROOT = root_digest(Scope())
BLOCKS = hashes_of(range(400))


def test_written_names_are_read_back(tmp_path):
    names = NamesFile(tmp_path)
    everyone = ScopeName(ROOT, "everyone")
    first, rest = ChainName(ROOT, BLOCKS[:3]), ChainName(BLOCKS[2], BLOCKS[3:])
    assert names.add(NamespaceName(FULL), NamespaceName(STATES), everyone, first)
    assert names.add(NamespaceName(FULL), everyone, rest)
    book = NameBook.read(tmp_path)
    assert list(book.namespaces.values()) == [FULL, STATES]
    assert book.scopes == {ROOT: "everyone"}
    assert book.parents == dict(zip(BLOCKS, [ROOT, *BLOCKS], strict=False))
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert sum("namespace" in line or "scope" in line for line in lines) == 3
    assert len(lines) == 5


def test_keys_are_those_of_the_namespaces():
    book = book_of([FULL, STATES], [(range(8), None)])
    first, second = hashes_of(range(8))
    names = {
        FULL.key(first): (FULL.digest, first),
        FULL.key(second): (FULL.digest, second),
        STATES.key(first): (STATES.digest, first),
        STATES.key(second): (STATES.digest, second),
    }
    assert book.named([*names, bytes(32)]) == (names, True)
    assert book.named([FULL.key(second)]) == ({FULL.key(second): names[FULL.key(second)]}, True)
    assert book.named([]) == ({}, True)


def test_naming_keys_takes_time_that_grows_with_keys_and_names(monkeypatch):
    tried = Counter()

    def counted(*words):
        tried[size] += 1
        return record_key(*words)

    monkeypatch.setattr(names_module, "record_key", counted)
    for size in (100, 200, 400):
        book = NameBook()
        for number in range(size):
            space = Namespace(f"model {number}", "float16", 16, "k v", (0,), (0, 1))
            block = sha256(bytes([number % 256, number // 256])).digest()
            book.add(NamespaceName(space))
            book.add(ChainName(bytes(32), [block]))
        named, is_all = book.named([bytes(32)])
        assert (named, is_all) == ({}, size < 2 * TRIES)
    assert tried[400] <= 2.2 * tried[200]


def test_a_book_says_itself_in_lines(tmp_path):
    book = book_of([FULL], [(range(400), None), ([*range(200), 7, 7, 7, 7], Scope(salt="b"))])
    write_names(book, tmp_path)
    again = NameBook.read(tmp_path)
    assert (again.parents, again.scopes) == (book.parents, book.scopes)
    assert again.num_bad_lines == 0


def test_lines_that_say_nothing_are_counted_and_the_rest_is_read(tmp_path):
    names = NamesFile(tmp_path)
    names.add(NamespaceName(FULL), ChainName(ROOT, BLOCKS[:1]))
    path = tmp_path / FILE_NAME
    good = path.read_bytes()
    bad = [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"type": "scope", "root": "AA==", "label": "x"}',
        b'{"type": "scope", "root": 3, "label": "x"}',
        b'{"type": "blocks", "parent": "AA==", "blocks": []}',
        b'{"type": "blocks", "parent": "a", "blocks": ["b"]}',
        b'{"type": "namespace", "namespace": {"model": 3}}',
        json.dumps({"namespace": []}).encode(),
        good.splitlines()[0][:40],
    ]
    path.write_bytes(b"\n".join([*bad, good]))
    book = NameBook.read(tmp_path)
    assert book.num_bad_lines == len(bad)
    assert list(book.namespaces.values()) == [FULL]
    assert book.parents == {BLOCKS[0]: ROOT}


def test_any_label_can_be_written_and_read(tmp_path):
    for label in ("", "ä\n\x1b", '"{'):
        assert NamesFile(tmp_path).add(ScopeName(ROOT, label))
        assert NameBook.read(tmp_path).scopes == {ROOT: label}


def test_no_line_of_rubbish_raises(tmp_path):
    names = NamesFile(tmp_path)
    names.add(NamespaceName(FULL), ScopeName(ROOT, "x"), ChainName(ROOT, BLOCKS[:2]))
    data = (tmp_path / FILE_NAME).read_bytes()
    for seed in range(500):
        random = Random(seed)
        changed = bytearray(data)
        for _ in range(random.randint(1, 5)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        (tmp_path / FILE_NAME).write_bytes(changed)
        list(NameBook.read(tmp_path).names())


def test_a_directory_without_names_has_an_empty_book(tmp_path):
    assert NameBook.read(tmp_path).parents == {}


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_names_path_that_is_no_file_holds_no_names_and_blocks_nobody(tmp_path, make):
    make(tmp_path / FILE_NAME)
    added, books = [], []

    def use():
        added.append(NamesFile(tmp_path).add(NamespaceName(FULL)))
        books.append(NameBook.read(tmp_path).parents)

    using = threading.Thread(target=use, daemon=True)
    using.start()
    using.join(5)
    assert (added, books) == ([False], [{}])


@pytest.mark.parametrize("kind", ["link", "other name", "other content", "other JSON"])
def test_a_file_of_somebody_else_is_not_written(tmp_path, kind):
    path, other = tmp_path / FILE_NAME, tmp_path / "other"
    other.write_bytes(b"")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "other name":
        path.hardlink_to(other)
    elif kind == "other content":
        path.write_text("Alice\nBob\n")
    else:
        path.write_text('{"type":"milk"}\n')
    before = path.read_bytes()
    assert not NamesFile(tmp_path).add(NamespaceName(FULL))
    assert (path.read_bytes(), other.read_bytes()) == (before, b"")


NAMED = msgspec.json.encode(ScopeName(ROOT, "x")) + b"\n"


@pytest.mark.parametrize("foreign", [b"milk\n", b'{"type":"milk"}\n', b"\n{}\n", b"\xff\n"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_with_a_line_of_somebody_else_is_not_replaced(tmp_path, foreign, is_first):
    path = tmp_path / FILE_NAME
    path.write_bytes(foreign + NAMED if is_first else NAMED + foreign)
    before = path.read_bytes()
    (tmp_path / f"{FILE_NAME}.1.tmp").write_bytes(b"mine")
    with pytest.raises(TierError, match=f"{FILE_NAME} is in the way"):
        write_names(NameBook(), tmp_path)
    assert purge_names(tmp_path, b"another ").is_complete, "nothing of the tenant is in it"
    told = purge_names(tmp_path, tag_of(ROOT))
    assert not told.is_complete
    assert f"{FILE_NAME} is in the way" in told.reason
    assert path.read_bytes() == before
    assert (tmp_path / f"{FILE_NAME}.1.tmp").read_bytes() == b"mine"


@pytest.mark.parametrize("length", [1, 5, 9, 12, 30, len(NAMED) - 1])
@pytest.mark.parametrize("end", [b"", b"\n", NAMED, bytes(40) + NAMED])
def test_a_line_that_was_cut_off_is_quires_own_and_purged(tmp_path, length, end):
    path = tmp_path / FILE_NAME
    path.write_bytes(NAMED + NAMED[:length] + end)
    assert purge_names(tmp_path, tag_of(ROOT)).is_complete
    assert NameBook.read(tmp_path).num_bad_lines == 0
    assert NameBook.read(tmp_path).scopes == {}


def test_writing_a_name_book_follows_no_link(tmp_path, monkeypatch):
    book, other = NameBook(), tmp_path / "other"
    other.write_bytes(b"precious")
    book.add(NamespaceName(FULL))
    (tmp_path / f"{FILE_NAME}.{os.getpid()}.tmp").symlink_to(other)
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    (tmp_path / f"{FILE_NAME}.0.tmp").symlink_to(other)
    with pytest.raises(TierError, match="cannot write"):
        write_names(book, tmp_path)
    monkeypatch.undo()
    assert (tmp_path / f"{FILE_NAME}.0.tmp").is_symlink()
    write_names(book, tmp_path)
    assert list(NameBook.read(tmp_path).namespaces.values()) == [FULL]
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).symlink_to(other)
    with pytest.raises(TierError, match=f"{FILE_NAME} is in the way"):
        write_names(book, tmp_path)
    assert other.read_bytes() == b"precious"


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / FILE_NAME).symlink_to(FILE_NAME)
    with pytest.raises(TierError, match="cannot read"):
        NameBook.read(tmp_path)


def test_unwritable_names_are_left_out_without_an_error(tmp_path):
    names = NamesFile(tmp_path / "gone")
    assert not names.add(NamespaceName(FULL))
    (tmp_path / "gone").mkdir()
    assert names.add(NamespaceName(FULL))
    assert list(NameBook.read(tmp_path / "gone").namespaces.values()) == [FULL]


def test_a_file_of_names_stops_growing_at_its_limit(tmp_path):
    names = NamesFile(tmp_path, limit_bytes=600)
    assert names.add(ChainName(ROOT, BLOCKS[:10]))
    assert not names.add(ChainName(ROOT, BLOCKS[10:20]))
    assert (tmp_path / FILE_NAME).stat().st_size <= 600
    assert len(NameBook.read(tmp_path).parents) == 10


def test_a_book_that_cannot_be_written_leaves_the_old_file(tmp_path):
    with pytest.raises(TierError, match="cannot write"):
        write_names(NameBook(), tmp_path / "gone")
