"""Small file systems of the tests' own: real ones, mounted where that is allowed."""

import os
import subprocess
from contextlib import contextmanager

import pytest


def command(*words):
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


@contextmanager
def mounted(folder, kind):
    """Mount an empty file system of 24 MiB; skips the test where that is not allowed."""
    image, path = folder / "image", folder / "mounted"
    path.mkdir()
    if kind == "ext4":
        with image.open("wb") as file:
            file.truncate(24 << 20)
        made = command("mkfs.ext4", "-q", "-F", str(image))
        done = made and command("mount", "-o", "loop", str(image), str(path))
    else:
        done = command("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path))
    if not done:
        pytest.skip(f"no {kind} can be mounted here")
    try:
        yield path
    finally:
        command("umount", "-l", str(path))


@contextmanager
def bound_read_only(path):
    """Mount a folder once more, to read only; skips the test where that is not allowed."""
    bound = path.with_name(f"{path.name}-bound")
    bound.mkdir()
    done = command("mount", "--bind", str(path), str(bound))
    if not done or not command("mount", "-o", "remount,ro,bind", str(bound)):
        command("umount", "-l", str(bound))
        pytest.skip("nothing can be mounted here")
    try:
        yield bound
    finally:
        command("umount", "-l", str(bound))


@contextmanager
def mounted_at(path):
    """Mount an empty file system at a folder; skips the test where that is not allowed."""
    if not command("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)):
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        command("umount", "-l", str(path))


@contextmanager
def unmounted(path):
    """Take a file system away from its folder for a while, with the files that are open there."""
    aside = path.with_name("aside")
    aside.mkdir(exist_ok=True)
    assert command("mount", "--bind", str(path), str(aside))
    assert command("umount", "-l", str(path))
    try:
        yield
    finally:
        assert command("mount", "--bind", str(aside), str(path))
        command("umount", "-l", str(aside))


def fill(path, num_left=0):
    """Write a file until nothing more fits, and give so many bytes of it back."""
    with (path / "other").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
    os.truncate(path / "other", (path / "other").stat().st_size - num_left)
