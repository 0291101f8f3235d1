"""`quire inspect DIR` and `quire cache`: what a new user sees, and what exit codes say."""

import json
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from cli_help import refusal, run, shown, told

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

from prefixes_help import FULL, STATES, book_of, hashes_of, store

from quire import Scope
from quire.cli.tier_place import reading
from quire.errors import TierError
from quire.exchange.hashing import root_digest, tenant_tag
from quire.tiers.contents.names import FILE_NAME, NameBook, write_names
from quire.tiers.disk import Disk
from quire.tiers.files import Files
from quire.tiers.files.room import file_of
from quire.tiers.format import record_bytes

SYSTEM = list(range(24))
ONE, TWO = [*SYSTEM, *range(100, 116)], [*SYSTEM, *range(200, 208)]
OTHER = Scope(salt="b")
PROMPTS = [(ONE, None), (TWO, None), (SYSTEM, OTHER)]
NUM_RECORDS = 6 + 4 + 2 + 6 + 1
SIZE = record_bytes(256)


def fill(tier, path):
    """One chat of two turns, another that parts from it, and a third in another scope."""
    for tokens, scope in PROMPTS:
        tier.put(*_records(hashes_of(tokens, scope)))
    store(tier, STATES, hashes_of(ONE)[-1:], group=1)
    write_names(book_of([FULL, STATES], PROMPTS), path)


def _records(blocks):
    from prefixes_help import sealed

    pairs = [sealed(FULL, block) for block in blocks]
    return [key for key, _ in pairs], [record for _, record in pairs]


@pytest.fixture(params=["disk", "files"])
def place(request, tmp_path):
    path = tmp_path / request.param
    tier = Disk(path, "1MiB", ahead="64KiB") if request.param == "disk" else Files(path)
    with tier:
        fill(tier, path)
    return path


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "files"
    with Files(path) as tier:
        fill(tier, path)
    return path


def held(place):
    return told("inspect", place)["total"]["records"]


def damage(path, key):
    file = Path(file_of(str(path), key))
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)


def test_inspect_shows_scopes_prefixes_and_sizes(place):
    text = shown("inspect", place, env={"COLUMNS": "120"})
    for word in ("model-a", "float16", "layers 0, 2", "24-40", "0-24", "8.2 KiB", "states"):
        assert word in text, word
    assert hashes_of(ONE)[0].hex()[:10] in text
    assert max(map(len, text.splitlines())) <= 120


def test_inspect_as_json_has_every_scope_and_namespace(place):
    found = told("inspect", place)
    assert (found["kind"], found["total"]["records"]) == (place.name, NUM_RECORDS)
    scopes = {scope["root"]: scope for scope in found["scopes"]}
    mine = scopes[root_digest(Scope()).hex()]
    assert [(run["start_token"], run["stop_token"]) for run in mine["runs"]] == [
        (0, 24),
        (24, 40),
        (24, 32),
    ]
    assert scopes[root_digest(OTHER).hex()]["tally"]["records"] == 6
    assert {row["namespace"]["dtype"] for row in found["namespaces"]} == {"float16", "mixed"}
    assert sum(found["total"]["recency"]) == found["total"]["num_bytes"]


def test_inspect_changes_nothing_and_runs_beside_a_writer(tmp_path):
    path = tmp_path / "disk"
    with Disk(path, "1MiB", ahead="64KiB") as tier:
        fill(tier, path)
        before = {each.name: each.read_bytes() for each in path.iterdir()}
        assert held(path) == NUM_RECORDS
        shown("cache", "verify", path)
        assert {each.name: each.read_bytes() for each in path.iterdir()} == before


def test_inspect_says_what_it_cannot_know_without_names(place):
    (place / FILE_NAME).unlink()
    text = shown("inspect", place, env={"COLUMNS": "120"})
    for word in ("without a name", "names.jsonl", FULL.digest.hex()[:12]):
        assert word in text


def test_a_picture_of_a_tier_has_at_most_top_rows_per_table(tmp_path):
    spaces = [msgspec.structs.replace(FULL, model=f"model {number}") for number in range(40)]
    with Files(tmp_path) as tier:
        for number, space in enumerate(spaces):
            store(tier, space, hashes_of(SYSTEM, Scope(salt=str(number)))[:1])
    prompts = [(SYSTEM, Scope(salt=str(number))) for number in range(40)]
    write_names(book_of(spaces, prompts), tmp_path)
    rows = shown("inspect", tmp_path, "--top", "5").splitlines()
    assert len(rows) < 60
    assert sum("and 35 smaller ones" in row for row in rows) == 2
    assert len(json.loads(shown("inspect", tmp_path, "--json"))["scopes"]) == 40


def test_names_cannot_move_the_cursor(files):
    book = NameBook.read(files)
    book.scopes[root_digest(Scope())] = "evil\x1b[2J\x07"
    write_names(book, files)
    text = shown("inspect", files)
    assert "\x1b" not in text
    assert "evil?[2J?" in text


def test_a_saved_cache_is_looked_at_where_its_records_are(files):
    saved = files.parent / "saved"
    saved.mkdir()
    files.rename(saved / "records")
    assert held(saved) == NUM_RECORDS
    shown("cache", "verify", saved)


def test_inspect_of_another_directory_says_what_is_expected(tmp_path):
    assert "not the directory of a tier" in refusal("inspect", tmp_path)


def test_a_whole_tier_verifies(place):
    found = told("cache", "verify", place)
    assert (found["records"], found["whole"], found["damaged"]) == (NUM_RECORDS, NUM_RECORDS, [])


def test_damage_is_an_exit_code_with_the_records_and_why(files):
    key = FULL.key(hashes_of(ONE)[3])
    damage(files, key)
    result = run("cache", "verify", files, "--json")
    assert result.exit_code == 1
    (each,) = json.loads(result.stdout)["damaged"]
    assert each["key"] == key.hex()
    assert "checksum" in each["reason"]
    done = run("cache", "verify", files)
    assert done.exit_code == 1
    assert key.hex()[:16] in done.stdout
    assert held(files) == NUM_RECORDS


def test_repair_drops_what_is_damaged_and_nothing_else(files):
    damage(files, FULL.key(hashes_of(ONE)[3]))
    assert told("cache", "verify", files, "--repair")["dropped"] == 1
    assert held(files) == NUM_RECORDS - 1
    shown("cache", "verify", files)


@pytest.mark.cases(2)
@pytest.mark.parametrize("offset", [0, 40, 100, 125, 200])
def test_damage_anywhere_in_a_slab_is_found_and_repaired(tmp_path, offset):
    path = tmp_path / "disk"
    with Disk(path, "1MiB", ahead="64KiB") as tier:
        fill(tier, path)
    slab = path / f"slab-{SIZE}.quire"
    data = bytearray(slab.read_bytes())
    at = data.index(b"quire-kv", 4 * SIZE)
    data[at + offset] ^= 1
    slab.write_bytes(data)
    result = run("cache", "verify", path, "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["damaged"]) == 1
    shown("cache", "verify", path, "--repair")
    shown("cache", "verify", path)
    assert held(path) == NUM_RECORDS - 1


def test_records_that_an_index_lost_are_counted_until_they_are_repaired(tmp_path):
    path = tmp_path / "disk"
    with Disk(path, "1MiB", ahead="64KiB") as tier:
        fill(tier, path)
    slab, index = path / f"slab-{SIZE}.quire", path / f"index-{SIZE}.quire"
    whole = index.read_bytes()
    index.write_bytes(whole[:64] + bytes([whole[64] ^ 1]) + whole[65:])
    assert told("cache", "verify", path)["lost"] == 0, "the record says it as well"
    data = bytearray(slab.read_bytes())
    data[0] ^= 1
    slab.write_bytes(data)
    result = run("cache", "verify", path, "--json")
    assert (result.exit_code, json.loads(result.stdout)["lost"]) == (1, 1)
    assert "lost" in run("cache", "verify", path).stdout
    shown("cache", "verify", path, "--repair")
    shown("cache", "verify", path)
    assert held(path) == NUM_RECORDS - 1


def test_evict_to_a_size_keeps_what_was_used_last(place):
    kept = 3 * SIZE
    found = told("cache", "evict", place, "--to", kept)
    assert found["left_bytes"] <= kept
    assert found["evicted"] + found["left"] == NUM_RECORDS
    after = told("inspect", place)
    assert after["total"]["num_bytes"] == found["left_bytes"]

    # The state was used last, before it the other scope's prompt, its head last.
    left = {scope["root"]: scope["runs"][0]["own"]["records"] for scope in after["scopes"]}
    assert left[root_digest(OTHER).hex()] == 2
    with reading(str(place)) as opened:
        heads = [FULL.key(block) for block in hashes_of(SYSTEM, OTHER)]
        assert opened.tier.contains(heads) == [True, True, False, False, False, False]
    slabs = sum(each.stat().st_size for each in place.glob("slab-*"))
    assert slabs <= kept


def test_evict_can_only_say_what_would_go(place):
    assert "would evict" in shown("cache", "evict", place, "--to", "1KiB", "--dry-run")
    assert held(place) == NUM_RECORDS


def test_evict_a_scope_leaves_the_others(place):
    label = NameBook.read(place).scopes[root_digest(OTHER)]
    assert told("cache", "evict", place, "--scope", label)["evicted"] == 6
    assert held(place) == NUM_RECORDS - 6
    assert root_digest(OTHER) not in NameBook.read(place).scopes


def test_evict_prefix_drops_the_block_and_all_behind_it(place):
    block = hashes_of(ONE)[6].hex()[:10]
    found = told("cache", "evict", place, "--prefix", block)
    assert found["evicted"] == 5
    found = told("cache", "evict", place, "--prefix", hashes_of(ONE)[0].hex()[:9])
    assert found["left"] == 6


def test_evict_all_drops_every_record(place):
    shown("cache", "evict", place, "--all")
    assert held(place) == 0


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what goes"),
        (("--all", "--to", "1KiB"), "say what goes"),
        (("--to", "much"), "not a size"),
        (("--scope", "nobody"), "no scope called 'nobody'; there are 'scope "),
        (("--prefix", "zz"), "no block's hash begins with 'zz'"),
    ],
    ids=str,
)
def test_evict_without_a_clear_wish_changes_nothing(files, words, message):
    assert message in refusal("cache", "evict", files, *words)
    assert held(files) == NUM_RECORDS


def test_scopes_and_prefixes_need_names(files):
    (files / FILE_NAME).unlink()
    assert "names.jsonl" in refusal("cache", "evict", files, "--scope", "x")


def test_a_copied_directory_is_the_same_tier(place, tmp_path):
    shutil.copytree(place, tmp_path / "copy")
    shown("cache", "verify", tmp_path / "copy")
    one, two = (told("inspect", each) for each in (place, tmp_path / "copy"))
    assert (one["total"], one["scopes"]) == (two["total"], two["scopes"])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("/no/such/place", "there is no such directory"),
        ("redis://user:secret@localhost:1", "localhost:1 cannot be"),
        ("redis://user:x/secret#secret@localhost:1", "# as %23"),
        ("redis://user:x?secret@localhost:1", "? as %3F"),
        ("nonsense:x", "no tier is called"),
    ],
)
def test_a_place_without_a_tier_is_said_and_no_password_shown(place, message):
    said = refusal("cache", "verify", place)
    assert message in said
    assert "secret" not in said


@pytest.mark.parametrize("words", [("inspect",), ("cache", "verify")], ids=str)
def test_a_missing_package_is_named_with_the_command_that_installs_it(files, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert "pip install '.[cli]'" in refusal(*words, files)


def test_a_directory_in_use_is_not_changed(tmp_path):
    path = tmp_path / "disk"
    with Disk(path, "1MiB", ahead="64KiB") as tier:
        fill(tier, path)
        assert "open for writing" in refusal("cache", "evict", path, "--all")
    assert held(path) == NUM_RECORDS


def test_verify_counts_nothing_as_lost_where_nothing_lay(tmp_path):
    path = tmp_path / "disk"
    with Disk(path, "1MiB", ahead="64KiB") as tier:
        fill(tier, path)
        gone = _records(hashes_of(SYSTEM, OTHER))[0]
        tier.delete(gone)
    index = path / f"index-{SIZE}.quire"
    rows = index.read_bytes()
    empty = [at for at in range(0, len(rows), 64) if not any(rows[at : at + 64])]
    assert len(empty) >= len(gone)
    for at in empty[: len(gone)] + empty[-1:]:
        index.write_bytes(rows[: at + 9] + b"\x10" + rows[at + 10 :])
        found = told("cache", "verify", path)
        assert (found["lost"], found["whole"]) == (0, NUM_RECORDS - len(gone))


def test_purge_leaves_nothing_of_a_tenant_and_says_how_much_went(place, tmp_path):
    from searching import found_in_files

    tag = tenant_tag(OTHER)
    assert found_in_files(place, tag)
    name = tmp_path / "name"
    name.write_text("b\n")
    found = json.loads(run("cache", "purge", place, "--tenant-file", name, "--json").stdout)
    assert (found["purged"], found["complete"], found["reason"]) == (6, True, "")
    assert found["purged_bytes"] == 6 * SIZE
    assert found_in_files(place, tag) == []
    with reading(str(place)) as held:
        assert len(list(held.tier.scan())) == NUM_RECORDS - 6
        assert root_digest(OTHER) not in held.names.scopes
    assert "purged 0 records" in run("cache", "purge", place, "--tenant", "b").stdout


def test_purge_of_what_cannot_be_purged_exits_with_1_and_its_reason(place, monkeypatch):
    monkeypatch.setattr("quire.tiers.contents.names.write_names", _fails)
    done = run("cache", "purge", place, "--tenant", "b")
    assert done.exit_code == 1
    assert "not complete: names.jsonl is not purged: full" in done.stdout


def _fails(*_):
    raise TierError("full")


@pytest.mark.cases(4)
@pytest.mark.parametrize("given", [[], ["--tenant", "a", "--tenant-file", "-"], ["--tenant", ""]])
def test_purge_needs_one_tenant(place, given):
    assert "tenant" in refusal("cache", "purge", place, *given)
