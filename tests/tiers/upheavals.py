"""Attacks of other processes on a tier's directory while it is open."""

import os
import shutil


def emptied(path):
    """`rm -rf path/*`."""
    for each in path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def removed(path):
    shutil.rmtree(path)


def replaced(path):
    """Another directory gets its name."""
    path.rename(path.with_name(f"{path.name}-{len(list(path.parent.iterdir()))}"))
    path.mkdir()


def swept(path):
    """A cleaner deletes empty folders, and files that nobody has read for long: the marker and the lock."""
    for each in list(path.iterdir()):
        if each.is_dir() and not any(each.iterdir()):
            each.rmdir()
        elif each.name in ("quire-tier", "lock", "names.jsonl"):
            each.unlink()


def unlocked(path):
    (path / "lock").unlink(missing_ok=True)


def without_unfinished(path):
    shutil.rmtree(path / "unfinished", ignore_errors=True)


def one_gone(path):
    """One file of the tier is removed."""
    files = sorted(each for each in path.rglob("*.quire") if each.is_file())
    if files:
        files[0].unlink()


def one_cut(path):
    """One file of the tier is cut to half."""
    files = sorted(each for each in path.rglob("*.quire") if each.is_file())
    if files:
        os.truncate(files[-1], files[-1].stat().st_size // 2)


def without_files(path):
    """All files are removed, and folders left."""
    for each in path.rglob("*"):
        if each.is_file():
            each.unlink()


UPHEAVALS = [
    emptied,
    without_files,
    removed,
    replaced,
    swept,
    unlocked,
    without_unfinished,
    one_gone,
    one_cut,
]
