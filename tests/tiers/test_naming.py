"""The names that an engine writes beside the records of its tiers."""

import pytest
from dict_tier import DictTier
from prefixes_help import FULL, STATES

from quire import CacheManager, Scope
from quire.engines.tiered.naming import Naming, scope_label
from quire.exchange import Digests
from quire.exchange.hashing import block_hashes, root_digest
from quire.tiers.contents.names import FILE_NAME, NameBook
from quire.tiers.disk import Disk
from quire.tiers.files import Files

PROMPT = list(range(40))
OTHER = Scope(salt="a secret", lora="translate")


@pytest.fixture
def manager():
    return CacheManager(64, 4, watchers=[Digests()])


@pytest.fixture(params=["files", "disk"])
def tier(request, tmp_path):
    with Files(tmp_path) if request.param == "files" else Disk(tmp_path, "1MiB") as opened:
        yield opened


def naming_of(tiers, namespaces):
    return Naming(tiers, namespaces, lambda _, function: function())


def serve(manager, naming, tokens, scope=None):
    seq = manager.open(tokens, scope)
    manager.take_copies()
    manager.reserve(seq, len(tokens) - seq.computed)
    manager.commit(seq, tokens[seq.computed :])
    naming.of(manager, seq.node, scope or Scope())()
    manager.close(seq)


def test_a_chain_is_written_from_its_root(manager, tier, tmp_path):
    naming = naming_of([DictTier(), tier], [FULL, STATES])
    serve(manager, naming, PROMPT)
    book = NameBook.read(tmp_path)
    blocks = block_hashes(PROMPT, 4)
    assert book.parents == dict(zip(blocks, [root_digest(Scope()), *blocks], strict=False))
    assert list(book.namespaces.values()) == [FULL, STATES]
    assert book.scopes == {root_digest(Scope()): "everyone"}


def test_known_names_are_not_written_again(manager, tier, tmp_path):
    naming = naming_of([tier], [FULL])
    serve(manager, naming, PROMPT)
    size = (tmp_path / FILE_NAME).stat().st_size
    serve(manager, naming, PROMPT)
    serve(manager, naming_of([tier], [FULL]), PROMPT)
    assert (tmp_path / FILE_NAME).stat().st_size == size
    serve(manager, naming, [*PROMPT, *range(8)])
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert len(lines) == 4
    book = NameBook.read(tmp_path)
    assert list(book.parents) == block_hashes([*PROMPT, *range(8)], 4)


def test_another_namespace_of_known_blocks_is_named(manager, tier, tmp_path):
    serve(manager, naming_of([tier], [FULL]), PROMPT)
    serve(manager, naming_of([tier], [STATES, FULL]), PROMPT)
    assert list(NameBook.read(tmp_path).namespaces.values()) == [FULL, STATES]
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert len(lines) == 4


def test_branches_begin_where_they_part(manager, tier, tmp_path):
    naming = naming_of([tier], [FULL])
    serve(manager, naming, PROMPT)
    serve(manager, naming, [*PROMPT[:20], *range(500, 520)])
    book = NameBook.read(tmp_path)
    new = block_hashes([*PROMPT[:20], *range(500, 520)], 4)
    assert book.parents[new[5]] == block_hashes(PROMPT, 4)[4]
    assert len(book.parents) == 15


def test_another_scope_has_its_own_root_and_its_salt_is_not_written(manager, tier, tmp_path):
    naming = naming_of([tier], [FULL])
    serve(manager, naming, PROMPT)
    serve(manager, naming, PROMPT, OTHER)
    book = NameBook.read(tmp_path)
    assert book.scopes[root_digest(OTHER)] == scope_label(OTHER)
    assert scope_label(OTHER).startswith("lora translate, salt #")
    assert "secret" not in (tmp_path / FILE_NAME).read_text()


def test_forgotten_names_are_written_again_and_read_once(manager, tier, tmp_path, monkeypatch):
    monkeypatch.setattr("quire.engines.tiered.naming.KEPT", 5)
    naming = naming_of([tier], [FULL])
    for _ in range(3):
        serve(manager, naming, PROMPT)
        serve(manager, naming, [9] * 40)
    assert len(NameBook.read(tmp_path).parents) == 20


def test_a_directory_that_cannot_be_written_is_no_error(manager, tier, tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    serve(manager, naming_of([tier], [FULL]), PROMPT)


def test_tiers_without_a_directory_are_left_alone(manager):
    serve(manager, naming_of([DictTier()], [FULL]), PROMPT)
