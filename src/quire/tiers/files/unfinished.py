"""The folder `unfinished` of a directory: files that are being written, and marks of purges."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable

from quire.tiers.directory import (
    Access,
    Descriptor,
    InTheWay,
    create_file,
    make_folder,
    open_file,
    open_folder,
)
from quire.tiers.format import KEY_BYTES, TENANT_AT

_RECORD = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.[0-9a-f]{{16}}")
_OWN = re.compile(rf"{_RECORD.pattern}|[0-9a-f]{{16}}|purged\.[0-9a-f]{{32}}")


def begin(path: str, access: Access, stale_s: float | None) -> int:
    """Make the folder, check that it is writable, delete stale files; return its time in ns.

    Files older than `stale_s` are stale. Raises `OSError`.
    """
    with Descriptor(make_folder(path, access)) as folder:
        probe = secrets.token_hex(8)
        os.close(create_file(probe, folder, access))
        now_ns = os.stat(probe, dir_fd=folder).st_mtime_ns
        os.unlink(probe, dir_fd=folder)
        if stale_s is not None:
            before_ns = now_ns - int(stale_s * 1e9)
            _delete(folder, _OWN, lambda _, status: status.st_mtime_ns < before_ns)
    return now_ns


def delete_of(path: str, tag: bytes) -> None:
    """Delete the files of a tenant tag that are being written. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError), Descriptor(open_folder(path)) as folder:
        part = slice(TENANT_AT * 2, KEY_BYTES * 2)
        _delete(folder, _RECORD, lambda name, _: name[part] == tag.hex())


def _delete(
    folder: int, pattern: re.Pattern[str], is_meant: Callable[[str, os.stat_result], bool]
) -> None:
    """Delete files as far as they are quire's: of a pattern, regular, and with no other name. Raises `OSError`."""
    with os.scandir(folder) as found:
        for entry in found:
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                    if is_own and is_meant(entry.name, status):
                        os.unlink(entry.name, dir_fd=folder)


def read_mark(path: str, name: str) -> bytes:
    """Return the mark of a purge, empty where there is none. Raises `OSError`."""
    with (
        contextlib.suppress(FileNotFoundError, InTheWay),
        Descriptor(open_folder(path)) as folder,
        Descriptor(open_file(f"purged.{name}", os.O_RDONLY, folder)) as file,
    ):
        return os.read(file, 64)
    return b""


def set_mark(path: str, name: str, access: Access) -> None:
    """Write a mark where it is deleted when it is stale: no write takes so long. Raises `OSError`."""
    with Descriptor(make_folder(path, access)) as folder:
        fresh = secrets.token_hex(8)
        with Descriptor(create_file(fresh, folder, access)) as file:
            os.write(file, secrets.token_bytes(16))
        os.rename(fresh, f"purged.{name}", src_dir_fd=folder, dst_dir_fd=folder)


def sync(path: str) -> None:
    """Return when what was deleted in a folder stays so after a loss of power. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError, InTheWay), Descriptor(open_folder(path)) as folder:
        os.fsync(folder)
