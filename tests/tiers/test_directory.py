"""A tier's directory: nothing in it that is not quire's is deleted, written or followed; who may read it."""

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
from file_systems import bound_read_only
from foreign import KEYS, Foreign, planted
from hypothesis import example
from processes import forked
from typer.testing import CliRunner
from upheavals import without_files

from quire.cli.app import app
from quire.engines.tiered.opening import open_stack
from quire.errors import ConfigError, QuireError, TierError
from quire.tiers import open_tier, wrapped
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.directory import MARKER
from quire.tiers.disk import Disk
from quire.tiers.files import Files
from quire.tiers.format import record_bytes
from quire.tiers.opening import open_tiers
from turns import drawn

HIT, STORED = Outcome.HIT, Outcome.STORED
SIZE = record_bytes(1000)
OPENS = {
    "files": lambda path: Files(path, 4 * SIZE),
    "disk": lambda path: Disk(path, 4 * SIZE, ahead=1),
}
ROOM = {"files": {"capacity": 4 * SIZE}, "disk": {"capacity": 4 * SIZE}}
ROOM_LINE = {"files": f"capacity={4 * SIZE}", "disk": f"capacity={4 * SIZE}"}
tiers = pytest.mark.parametrize("kind", OPENS)


def used(kind, path):
    """Use a tier in every way."""
    with contextlib.suppress(TierError), OPENS[kind](path) as tier:
        tier.put(KEYS, records_of(KEYS))
        tier.get(KEYS, buffers_like(records_of(KEYS)))
        tier.touch(KEYS)
        tier.contains(KEYS)
        tier.delete(KEYS[:1])
        more = names_of(range(100, 108))
        tier.put(more, records_of(more))
        list(tier.scan())


def commanded(path):
    """Use the commands on a directory."""
    run = CliRunner().invoke
    for words in (
        ["cache", "verify", path, "--repair"],
        ["inspect", path],
        ["cache", "evict", path, "--all"],
        ["cache", "purge", path, "--tenant", "acme"],
    ):
        done = run(app, list(map(str, words)))
        assert done.exception is None or isinstance(done.exception, (SystemExit, QuireError)), words


@pytest.mark.cases(1)
@tiers
@drawn(2, 60, first=planted, then=planted)
@example(first={"unfinished": "folder", "unfinished/document": "file"}, then={})
@example(first={"unfinished/document": "file"}, then={})
@example(first={}, then={"unfinished/document": "file"})
@example(first={"unfinished": "link to a folder"}, then={})
@example(first={"quire-tier": "link", "README": "file"}, then={})
@example(first={"names.jsonl": "other name of a file"}, then={"names.jsonl": "link"})
@example(first={"names.jsonl": "file", "names.jsonl.1.tmp": "file"}, then={})
@example(first={"slab-1216.quire": "file"}, then={})
@example(first={"index-1216.quire": "file", "slab-64.quire": "file"}, then={})
@example(first={"slab-01216.quire": "file"}, then={"slab-01280.quire": "file"})
def test_nothing_foreign_is_deleted_written_or_followed(kind, first, then):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "kv"
        root.mkdir()
        before = Foreign(root, Path(folder) / "outside", first)
        for _ in range(2):
            used(kind, root)
            before.check()
        commanded(root)
        before.check()
        then = {name: each for name, each in then.items() if not os.path.lexists(root / name)}
        after = Foreign(root, Path(folder) / "outside too", then, is_marked=True)
        for _ in range(2):
            used(kind, root)
            after.check()
        commanded(root)
        before.check()
        after.check()


@pytest.mark.parametrize("name", ["slab-1216.quire", "index-1216.quire", "slab-64.quire"])
def test_a_refused_directory_gets_no_marker_and_every_later_opening_refuses_it_too(
    tmp_path, name, monkeypatch
):
    (tmp_path / name).write_bytes(b"mine" * 300)
    (tmp_path / "slab-128.quire").touch()
    before = every(tmp_path)
    for _ in range(3):
        with pytest.raises(TierError, match=f"{name} is in the way of a file of the tier"):
            Disk(tmp_path, "1MiB")
    monkeypatch.setattr(wrapped, "RETRY_S", 0.0)
    (late,) = open_tiers([f"disk:{tmp_path}?capacity=1MiB"])
    with late:
        for _ in range(3):
            assert late.put(KEYS, records_of(KEYS), 10) == [Outcome.ERROR] * len(KEYS)
    assert every(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["slab-01216.quire", "index-01216.quire", "slab-\u0661\u0662\u0668.quire"]
)
def test_files_that_look_like_slabs_are_left_alone(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine" * 304)
    for outcome in (STORED, Outcome.PRESENT):
        with Disk(tmp_path, "1MiB", ahead=1) as disk:
            assert disk.recovered.is_clean
            assert set(disk.put(KEYS, records_of(KEYS), 10)) == {outcome}
        with Disk(tmp_path, read_only=True) as disk:
            assert disk.get(KEYS, buffers_like(records_of(KEYS)), 10) == [HIT] * len(KEYS)
    assert (tmp_path / name).read_bytes() == b"mine" * 304


def test_a_folder_called_unfinished_makes_no_tier_of_a_directory(tmp_path):
    document = tmp_path / "unfinished" / "novel.txt"
    document.parent.mkdir()
    document.write_text("all of it")
    os.utime(document, (1e9, 1e9))
    for words in (["evict", str(tmp_path), "--all"], ["verify", str(tmp_path)]):
        done = CliRunner().invoke(app, ["cache", *words])
        assert done.exit_code == 2
        assert "is not the directory of a tier" in " ".join(done.output.split())
    stale = document.with_name(f"{KEYS[0].hex()}.{1:016x}")
    stale.write_text("part")
    os.utime(stale, (1e9, 1e9))
    Files(tmp_path).close()
    assert stale.exists(), "nobody had said that this is a tier"
    Files(tmp_path).close()
    assert not stale.exists()
    assert document.read_text() == "all of it"


@tiers
def test_a_marker_names_the_kind_and_the_version(kind, tmp_path):
    OPENS[kind](tmp_path).close()
    marker = tmp_path / MARKER
    assert json.loads(marker.read_text()) == {"quire": kind, "version": 1}
    marker.write_text(json.dumps({"quire": kind, "version": 2}))
    with pytest.raises(TierError, match="version 2 of a tier's directory; this quire knows 1"):
        OPENS[kind](tmp_path)
    marker.write_text(json.dumps({"quire": "other", "version": 1}))
    with pytest.raises(TierError, match=f"a other tier and cannot be one of a {kind} tier"):
        OPENS[kind](tmp_path)
    marker.write_text("shopping list")
    with pytest.raises(TierError, match=f"{marker} is no marker of a tier: move it elsewhere"):
        OPENS[kind](tmp_path)
    marker.write_text("")
    OPENS[kind](tmp_path).close()
    assert json.loads(marker.read_text())["quire"] == kind, "its writer had been cut off"


def every(path):
    """Return all that is in a directory, with its times."""
    return {
        each: (each.lstat().st_mtime_ns, each.read_bytes() if each.is_file() else b"")
        for each in (path, *path.rglob("*"))
    }


def stack_of(line):
    """Return the tier of a stack that only reads."""
    return open_stack([line], {"read_only": True}).tiers[0]


def modes(path):
    return {
        stat.S_IMODE(each.lstat().st_mode) for each in (path, *path.rglob("*")) if each.is_dir()
    }, {stat.S_IMODE(each.lstat().st_mode) for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
@tiers
def test_a_directory_is_its_owners_alone_whatever_the_umask_is(kind, umask, tmp_path):
    was = os.umask(umask)
    try:
        used(kind, tmp_path / "kv")
    finally:
        os.umask(was)
    folders, files = modes(tmp_path / "kv")
    assert folders == {0o700 & ~umask}
    assert files == {0o600 & ~umask}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to a group that nobody is in")
@tiers
def test_all_files_belong_to_the_group_of_the_settings_or_of_the_marker(kind, tmp_path):
    path, group = tmp_path / "kv", 54321
    was = os.umask(0o077)
    try:
        open_tier({"kind": kind, "path": str(path), "group": str(group), **ROOM[kind]}).close()
        used(kind, path)
        commanded(path)
        used(kind, path)
    finally:
        os.umask(was)
    folders, files = modes(path)
    assert (folders, files) == ({0o2770}, {0o660})
    assert {each.lstat().st_gid for each in (path, *path.rglob("*"))} == {group}
    with pytest.raises(TierError, match=f"a tier of the group {group}, not of the group 7"):
        open_tier({"kind": kind, "path": str(path), "group": "7", **ROOM[kind]})


@tiers
def test_a_group_that_is_none_is_refused_before_anything_is_made(kind, tmp_path):
    for group in ("no such group", "", "-1", "root\0"):
        with pytest.raises(ConfigError, match="no group"):
            open_tier({"kind": kind, "path": str(tmp_path / "kv"), "group": group, **ROOM[kind]})
    assert not (tmp_path / "kv").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes two other users")
def test_two_users_of_a_group_read_and_replace_each_others_records(tmp_path):
    path, group, keys = tmp_path / "kv", 54321, names_of(range(6))
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    path.mkdir()
    os.chown(path, -1, group)
    path.chmod(0o2770)

    def use(user, payload_bytes):
        os.setgroups([group])
        os.setgid(user)
        os.setuid(user)
        os.umask(0o022)
        with Files(path, "1MiB", group=group) as tier:
            records = records_of(keys, payload_bytes)
            assert tier.put(keys, records) == [STORED] * 6
            assert tier.get(keys, buffers_like(records)) == [HIT] * 6
            tier.delete(keys[:2])

    for user, payload_bytes in ((60001, 1000), (60002, 2000), (60001, 3000)):
        assert forked(lambda user=user, size=payload_bytes: use(user, size)) == 0


@tiers
def test_a_read_only_tier_is_read_and_nothing_is_written(kind, tmp_path, caplog):
    keys, more = names_of(range(3)), names_of(range(50, 52))
    with OPENS[kind](tmp_path) as tier:
        tier.put(keys, records_of(keys))
    (file,) = [
        each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size == SIZE
    ][:1] or [None]
    before = every(tmp_path)
    line = f"{kind}:{tmp_path}?read_only=true"
    for opens in (lambda: open_tier(line), lambda: stack_of(line.partition("?")[0])):
        with opens() as tier:
            assert tier.get(keys, buffers_like(records_of(keys)), 10) == [HIT] * 3
            assert tier.put(more, records_of(more), 10) == [Outcome.SKIPPED] * 2
            assert tier.contains(keys) == [True] * 3
            tier.touch(keys[::-1])
            tier.delete(keys)
            tier.flush()
            tier.check()
        assert every(tmp_path) == before
    if kind == "files":
        file.write_bytes(b"rubbish")
        with open_tier(line) as tier:
            assert tier.get(keys, buffers_like(records_of(keys)), 10).count(Outcome.CORRUPT) == 1
        assert file.read_bytes() == b"rubbish"
    with pytest.raises(TierError):
        open_tier(f"{kind}:{tmp_path}/gone?read_only=true")
    assert not (tmp_path / "gone").exists()


@tiers
def test_a_read_only_file_system_is_read_and_says_so(kind, tmp_path, caplog):
    path, keys = tmp_path / "kv", names_of(range(3))
    with OPENS[kind](path) as tier:
        tier.put(keys, records_of(keys))
    with bound_read_only(path) as bound:
        for tier in (
            OPENS[kind](bound),
            open_tier(f"{kind}:{bound}?read_only=true&{ROOM_LINE[kind]}"),
        ):
            with tier:
                assert tier.is_read_only
                assert tier.get(keys, buffers_like(records_of(keys)), 10) == [HIT] * 3
                assert tier.put(keys, records_of(keys), 10) == [Outcome.SKIPPED] * 3
        assert caplog.text.count("opened to read only") == 1, "who asked for it knows"
        for words in (["evict", bound, "--all"], ["purge", bound, "--tenant", "acme"]):
            done = CliRunner().invoke(app, ["cache", *map(str, words)])
            assert done.exit_code == 2, done.output
            assert "nothing may be written there" in " ".join(done.output.split())


@tiers
def test_a_directory_of_which_only_folders_are_left_is_a_new_tier_with_a_marker(kind, tmp_path):
    with OPENS[kind](tmp_path) as tier:
        tier.put(KEYS[:3], records_of(KEYS[:3]), 10)
        without_files(tmp_path)
        assert tier.put(KEYS[:3], records_of(KEYS[:3]), 10) == [STORED] * 3
        assert tier.num_renewed == 1
        assert "it is a new, empty tier" in tier.last_failure
        assert tier.get(KEYS[:3], buffers_like(records_of(KEYS[:3])), 10) == [HIT] * 3
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert done.exit_code == 0, done.output
