"""Things that are no tier's, with any name, in a tier's directory; and what became of them."""

import os
import socket
from pathlib import Path

from hypothesis import strategies as st

from quire.tiers.contract.samples import name_of

KEYS = [name_of(number) for number in range(6)]
OWN_FILES = ("quire-tier", "names.jsonl", "lock", "slab-1216.quire", "index-1216.quire")
SLABS = ("slab-", "index-")
OWN_FOLDERS = ("unfinished", *(key.hex()[:2] for key in KEYS[:3]))
LOOK_ALIKES = ("slab-64.quire", "index-64.quire", "slab-01216.quire", "names.jsonl.1.tmp")
KINDS = (
    "file",
    "folder",
    "link",
    "link to a folder",
    "dangling link",
    "pipe",
    "socket",
    "other name of a file",
)

places = st.one_of(
    st.sampled_from([*OWN_FILES, *OWN_FOLDERS, "README", *LOOK_ALIKES]),
    st.sampled_from(["document", f"{KEYS[0].hex()}.{1:016x}", KEYS[1].hex()]).map(
        "unfinished/{}".format
    ),
    st.sampled_from(KEYS).map(lambda key: f"{key.hex()[:2]}/{key.hex()}.quire"),
    st.sampled_from(KEYS).map(lambda key: f"{key.hex()[:2]}/notes"),
)
planted = st.dictionaries(places, st.sampled_from(KINDS), max_size=4)


def is_record(name, kind):
    """Whether it is what a tier itself would have there: a regular file of its own pattern."""
    folder, _, file = name.rpartition("/")
    if not folder and file.startswith(SLABS):
        return False
    return kind in ("file", "other name of a file") and (
        (folder == "unfinished" and file.count(".") == 1) or file.endswith(".quire")
    )


class Foreign:
    """Plants things below `root`, which link to things in `outside`; `check` compares all with how they were.

    Where `is_marked`, a marker says that files with names of slabs are the tier's.
    """

    def __init__(self, root, outside, things, *, is_marked=False):
        self.outside = outside
        (outside / "folder").mkdir(parents=True)
        for name in ("file", "linked", "folder/inside"):
            (outside / name).write_bytes(b"precious" * 200)
        self.planted = {}
        for name, kind in sorted(things.items()):
            path = root / name
            if path.parent != root and path.parent.name in things:
                continue
            if os.path.lexists(path.parent) and (
                path.parent.is_symlink() or not path.parent.is_dir()
            ):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            self._plant(path, kind)
            is_slab = is_marked and name.startswith(SLABS) and not name.startswith("slab-0")
            self.planted[path] = is_record(name, kind) or is_slab
        long_ago = 1e9
        for path in (*self.planted, *outside.rglob("*")):
            os.utime(path, (long_ago, long_ago), follow_symlinks=False)
        self.before = {path: seen(path) for path in self.planted}
        self.outside_before = {path: seen(path) for path in outside.rglob("*")}

    def _plant(self, path, kind):
        if kind == "file":
            path.write_bytes(b"mine" * 300)
        elif kind == "folder":
            path.mkdir()
            (path / "inside").write_bytes(b"mine" * 300)
        elif kind == "link":
            path.symlink_to(self.outside / "file")
        elif kind == "link to a folder":
            path.symlink_to(self.outside / "folder")
        elif kind == "dangling link":
            path.symlink_to(self.outside / "new")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            here = Path.cwd()
            os.chdir(path.parent)
            try:
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(path.name)
            finally:
                os.chdir(here)
        else:
            path.hardlink_to(self.outside / "linked")

    def check(self):
        for path, is_own in self.planted.items():
            assert is_own or seen(path) == self.before[path], path
        assert {path: seen(path) for path in self.outside.rglob("*")} == self.outside_before


def seen(path):
    """Return what one sees of a thing: its number, its kind, and its content."""
    status = os.lstat(path)
    content = ()
    if path.is_symlink():
        content = path.readlink()
    elif path.is_file():
        content = path.read_bytes()
    elif path.is_dir():  # a folder may get files of a tier
        content = {each: seen(each) for each in path.iterdir() if each.name == "inside"}
    return status.st_ino, status.st_mode, content
