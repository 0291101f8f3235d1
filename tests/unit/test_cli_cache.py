"""`quire inspect DIR` and `quire cache`: what a new user sees, and what exit codes say."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

from prefixes_help import FULL, STATES, book_of, hashes_of, store

from quire import Scope
from quire.cli.app import app
from quire.cli.tier_place import reading
from quire.exchange.hashing import root_digest
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


@pytest.fixture
def run():
    runner = CliRunner()

    def call(*words, **options):
        result = runner.invoke(app, [str(word) for word in words], **options)
        assert "Traceback" not in result.output
        return result

    return call


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


def held(run, place):
    return json.loads(run("inspect", place, "--json").stdout)["total"]["records"]


def damage(path, key):
    file = Path(file_of(str(path), key))
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("words", [(), ("verify",), ("evict",)], ids=str)
def test_every_command_explains_itself(run, words):
    result = run("cache", *words, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout


def test_inspect_shows_scopes_prefixes_and_sizes(run, place):
    shown = run("inspect", place, env={"COLUMNS": "120"}).stdout
    for word in ("model-a", "float16", "layers 0, 2", "24-40", "0-24", "7.0 KiB", "states"):
        assert word in shown, word
    assert hashes_of(ONE)[0].hex()[:10] in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_inspect_as_json_has_all_of_it(run, place):
    found = json.loads(run("inspect", place, "--json").stdout)
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


def test_inspect_changes_nothing_and_runs_beside_a_writer(run, tmp_path):
    path = tmp_path / "disk"
    with Disk(path, "1MiB", ahead="64KiB") as tier:
        fill(tier, path)
        before = {each.name: each.read_bytes() for each in path.iterdir()}
        assert held(run, path) == NUM_RECORDS
        assert run("cache", "verify", path).exit_code == 0
        assert {each.name: each.read_bytes() for each in path.iterdir()} == before


def test_inspect_says_what_it_cannot_know_without_names(run, place):
    (place / FILE_NAME).unlink()
    shown = run("inspect", place, env={"COLUMNS": "120"}).stdout
    assert "without a name" in shown
    assert "names.jsonl" in shown
    assert FULL.digest.hex()[:12] in shown


def test_inspect_draws_the_tier_into_a_file(run, place, tmp_path):
    assert run("inspect", place, "--report", tmp_path / "tier.svg").exit_code == 0
    assert (tmp_path / "tier.svg").read_text().startswith("<svg")
    result = run("inspect", place, "--report", tmp_path / "no" / "tier.svg")
    assert (result.exit_code, "cannot write" in result.stderr) == (2, True)


def test_names_cannot_move_the_cursor(run, files):
    book = NameBook.read(files)
    book.scopes[root_digest(Scope())] = "evil\x1b[2J\x07"
    write_names(book, files)
    shown = run("inspect", files).stdout
    assert "\x1b" not in shown
    assert "evil?[2J?" in shown


def test_a_saved_cache_is_looked_at_where_its_records_are(run, files):
    saved = files.parent / "saved"
    saved.mkdir()
    files.rename(saved / "records")
    assert held(run, saved) == NUM_RECORDS
    assert run("cache", "verify", saved).exit_code == 0


def test_inspect_of_another_directory_says_what_is_expected(run, tmp_path):
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert "not the directory of a tier" in result.stderr


def test_a_whole_tier_verifies(run, place):
    result = run("cache", "verify", place, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["records"], found["whole"], found["damaged"]) == (NUM_RECORDS, NUM_RECORDS, [])


def test_damage_is_an_exit_code_with_the_records_and_why(run, files):
    key = FULL.key(hashes_of(ONE)[3])
    damage(files, key)
    result = run("cache", "verify", files, "--json")
    assert result.exit_code == 1
    (each,) = json.loads(result.stdout)["damaged"]
    assert each["key"] == key.hex()
    assert "checksum" in each["reason"]
    shown = run("cache", "verify", files)
    assert shown.exit_code == 1
    assert key.hex()[:16] in shown.stdout
    assert held(run, files) == NUM_RECORDS


def test_repair_drops_what_is_damaged_and_nothing_else(run, files):
    damage(files, FULL.key(hashes_of(ONE)[3]))
    result = run("cache", "verify", files, "--repair", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["dropped"] == 1
    assert held(run, files) == NUM_RECORDS - 1
    assert run("cache", "verify", files).exit_code == 0


@pytest.mark.parametrize("offset", [0, 40, 100, 125, 200])
def test_damage_anywhere_in_a_slab_is_found_and_repaired(run, tmp_path, offset):
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
    assert run("cache", "verify", path, "--repair").exit_code == 0
    assert run("cache", "verify", path).exit_code == 0
    assert held(run, path) == NUM_RECORDS - 1


def test_evict_to_a_size_keeps_what_was_used_last(run, place):
    kept = 3 * SIZE
    result = run("cache", "evict", place, "--to", kept, "--json")
    found = json.loads(result.stdout)
    assert found["left_bytes"] <= kept
    assert found["evicted"] + found["left"] == NUM_RECORDS
    after = json.loads(run("inspect", place, "--json").stdout)
    assert after["total"]["num_bytes"] == found["left_bytes"]

    # The state was used last, before it the other scope's prompt, its head last.
    left = {scope["root"]: scope["runs"][0]["own"]["records"] for scope in after["scopes"]}
    assert left[root_digest(OTHER).hex()] == 2
    with reading(str(place)) as opened:
        heads = [FULL.key(block) for block in hashes_of(SYSTEM, OTHER)]
        assert opened.tier.contains(heads) == [True, True, False, False, False, False]
    slabs = sum(each.stat().st_size for each in place.glob("slab-*"))
    assert slabs <= kept


def test_evict_can_only_say_what_would_go(run, place):
    result = run("cache", "evict", place, "--to", "1KiB", "--dry-run")
    assert "would evict" in result.stdout
    assert held(run, place) == NUM_RECORDS


def test_evict_a_scope_leaves_the_others(run, place):
    label = NameBook.read(place).scopes[root_digest(OTHER)]
    assert (
        json.loads(run("cache", "evict", place, "--scope", label, "--json").stdout)["evicted"] == 6
    )
    assert held(run, place) == NUM_RECORDS - 6
    assert root_digest(OTHER) not in NameBook.read(place).scopes


def test_evict_a_prefix_takes_all_behind_it(run, place):
    block = hashes_of(ONE)[6].hex()[:10]
    found = json.loads(run("cache", "evict", place, "--prefix", block, "--json").stdout)
    assert found["evicted"] == 5
    found = json.loads(
        run("cache", "evict", place, "--prefix", hashes_of(ONE)[0].hex()[:9], "--json").stdout
    )
    assert found["left"] == 6


def test_evict_everything(run, place):
    assert run("cache", "evict", place, "--all").exit_code == 0
    assert held(run, place) == 0


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
def test_evict_without_a_clear_wish_changes_nothing(run, files, words, message):
    result = run("cache", "evict", files, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert held(run, files) == NUM_RECORDS


def test_scopes_and_prefixes_need_names(run, files):
    (files / FILE_NAME).unlink()
    result = run("cache", "evict", files, "--scope", "x")
    assert result.exit_code == 2
    assert "names.jsonl" in result.stderr


def test_a_copied_directory_is_the_same_tier(run, place, tmp_path):
    shutil.copytree(place, tmp_path / "copy")
    assert run("cache", "verify", tmp_path / "copy").exit_code == 0
    one, two = (
        json.loads(run("inspect", each, "--json").stdout) for each in (place, tmp_path / "copy")
    )
    assert (one["total"], one["scopes"]) == (two["total"], two["scopes"])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("/no/such/place", "there is no such directory"),
        ("redis://user:secret@localhost:1", "cannot be reached"),
        ("nonsense:x", "no tier is called"),
    ],
)
def test_a_place_without_a_tier_is_said_and_no_password_shown(run, place, message):
    result = run("cache", "verify", place)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "secret" not in result.output


@pytest.mark.parametrize("words", [("inspect",), ("cache", "verify")], ids=str)
def test_a_missing_package_is_said_with_how_to_get_it(run, files, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    result = run(*words, files)
    assert result.exit_code == 2
    assert "pip install 'quire-kv[cli]'" in result.stderr


def test_a_directory_in_use_is_not_changed(run, tmp_path):
    path = tmp_path / "disk"
    with Disk(path, "1MiB", ahead="64KiB") as tier:
        fill(tier, path)
        result = run("cache", "evict", path, "--all")
        assert result.exit_code == 2
        assert "open for writing" in result.stderr
    assert held(run, path) == NUM_RECORDS
