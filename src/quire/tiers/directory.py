"""The directory of a tier: its rights, quire's files in it, and its renewal.

A tier's directory has a marker, `quire-tier`: one line of JSON, `{"quire":"files","version":1}`, written when the tier is
begun. Rules for all tiers in directories:

- Below the directory no link is followed, and new files are created exclusively.
- Files are 0600 and folders 0700; with a group 0660 and 2770, whatever the umask is. The marker says which: a process that
  opens the directory without a group takes over the marker's.
- Only names of quire's own pattern are deleted or replaced, only where they are regular files, and none in the opening that
  first marks a directory. So a directory that holds other things is no error: a mount has its `lost+found`, people
  leave notes, and neither is touched.
- A directory that was emptied becomes a new, empty tier. On another file system it does not: then something is not mounted.
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from quire.errors import ConfigError, TierError

MARKER = "quire-tier"
VERSION = 1

_log = logging.getLogger(__name__)

_MOST_BYTES = 4096
_OPEN_MARKER = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class InTheWay(OSError):  # noqa: N818 - as the errors of quire.errors
    """Something that is not quire's has the name of something that would be."""

    def __init__(self, path: str) -> None:
        super().__init__(
            errno.EEXIST, "is in the way of a file of the tier: move it elsewhere", path
        )

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class Descriptor(int):
    """The number of an open file or folder that a `with` block closes.

    It takes a microsecond longer than `finally`, which is used on the way of each record.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self)


class Access(msgspec.Struct, frozen=True):
    """Rights of new files and folders: the owner's alone, or a group's too, by its number."""

    group: int | None = None

    def give(self, descriptor: int) -> None:
        """Set group and mode of a new file or folder, whatever the umask is. Raises `OSError`."""
        if self.group is None:
            return
        status = os.fstat(descriptor)
        if status.st_gid != self.group:
            os.fchown(descriptor, -1, self.group)
        mode = (
            0o2770 if stat.S_ISDIR(status.st_mode) else 0o660
        )  # what is made in a folder has its group
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(descriptor, mode)


class _Marker(msgspec.Struct, forbid_unknown_fields=False):
    """Content of the marker: the kind of the tier, and the version of the directory's format."""

    quire: str
    version: int


class TierDirectory:
    """A directory that holds a tier of one kind.

    `path`        absolute
    `access`      rights of what is made in it, once it is open
    `was_marked`  whether it had a marker when it was opened: until then nothing in it is deleted
    `num_renewed` how often it was emptied or replaced while it was open, and begun anew
    """

    def __init__(self, path: Path, kind: str, group: str | int | None = None) -> None:
        self.path = path
        self.access = Access(group_number(group))
        self.was_marked = False
        self.num_renewed = 0
        self._kind = kind
        self._device = -1

    def begin(self, judge: Callable[[Path], None] | None = None) -> None:
        """Make the directory and its marker if need be. Raises `OSError`, and `TierError` for one of another kind.

        Before a marker is written, `judge` may refuse what is in the directory: a marker says that the tier's names are quire's.
        """
        self._make()
        with Descriptor(os.open(self.path, _OPEN_FOLDER)) as folder:
            self.was_marked = self._mark(folder, judge)
            self._device = os.fstat(folder).st_dev

    def look(self) -> None:
        """Read the marker, if there is one, and change nothing. Raises `OSError` and `TierError`."""
        with Descriptor(os.open(self.path, _OPEN_FOLDER)) as folder:
            if has_marker(folder):
                self.was_marked = self._read_marker(folder)
            self._device = os.fstat(folder).st_dev

    def renew(self, judge: Callable[[Path], None] | None = None) -> bool:
        """Restore missing folders and marker; return whether the marker was missing, so the tier is new.

        `judge` as in `begin`. Raises `OSError`, also where the directory is on another file system than at
        first and has no marker.
        """
        if not self.path.exists():
            parent = next(each for each in self.path.parents if each.exists())
            self._check_device(parent.stat().st_dev)
            self._make()
        with Descriptor(os.open(self.path, _OPEN_FOLDER)) as folder:
            device = os.fstat(folder).st_dev
            if not has_marker(folder):
                self._check_device(device)
            self._device = device
            try:
                return not self._mark(folder, judge)
            except TierError as error:
                raise OSError(errno.ESTALE, str(error)) from error

    def say_renewed(self, what: str) -> str:
        """Count a renewal of the tier, warn at each power of two of them, and return the reason."""
        self.num_renewed += 1
        why = f"{self.path}: {what} while it was open; it is a new, empty tier"
        if not self.num_renewed & (self.num_renewed - 1):
            _log.warning("%s (%d times so far)", why, self.num_renewed)
        return why

    def _check_device(self, device: int) -> None:
        if device != self._device:
            raise OSError(
                errno.ESTALE,
                f"{self.path} is on another file system than when the tier was opened, and no tier there: "
                "mount what was mounted",
            )

    def _make(self) -> None:
        """Make the directory, if it is not there. Raises `OSError`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)

    def _mark(self, directory: int, judge: Callable[[Path], None] | None) -> bool:
        """Write the marker, unless it is there; return whether it was. Raises `OSError` and `TierError`."""
        if has_marker(directory) and self._read_marker(directory):
            return True
        if judge is not None and not has_marker(directory):
            judge(self.path)
        is_empty = not os.listdir(directory)
        # An empty one is completed: its writer was cut off, or is at it and writes the same.
        flags = _OPEN_MARKER | os.O_WRONLY | os.O_CREAT
        with Descriptor(os.open(MARKER, flags, 0o600, dir_fd=directory)) as file:
            try:
                if is_empty and os.fstat(directory).st_uid == os.geteuid():
                    self.access.give(directory)
                self.access.give(file)
                os.write(file, msgspec.json.encode(_Marker(self._kind, VERSION)) + b"\n")
                os.fsync(file)
            except OSError as error:  # without room it stays empty: the next opening completes it
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
        return False

    def _read_marker(self, directory: int) -> bool:
        """Check kind and version, and take over the group; return False for an empty one. Raises `OSError` and `TierError`."""
        path = self.path / MARKER
        found, status = _marker_in(directory, path)
        if found is None:
            return False
        if found.quire != self._kind:
            kind = found.quire[:20] if found.quire.isprintable() else "foreign"
            raise TierError(
                f"{self.path} is the directory of a {kind} tier and cannot be one of a {self._kind} "
                "tier too; use another directory"
            )
        if found.version != VERSION:
            raise TierError(
                f"{path}: version {found.version} of a tier's directory; this quire knows {VERSION}; use another "
                "directory, or the quire that wrote this one"
            )
        group = status.st_gid if status.st_mode & 0o060 else None
        if self.access.group not in (None, group):
            said = "its owner alone" if group is None else f"the group {group}"
            raise TierError(
                f"{self.path} is a tier of {said}, not of the group {self.access.group}; give its files to that group "
                "(chgrp -R, chmod -R g+rwX, folders g+s), or use another directory"
            )
        self.access = Access(group)
        return True


def kind_marked(path: Path) -> str | None:
    """Return the kind of tier that a directory's marker names; None without one that can be read."""
    with suppress(OSError, TierError), Descriptor(os.open(path, _OPEN_FOLDER)) as directory:
        found, _ = _marker_in(directory, path / MARKER)
        if found is None:  # written where there was no room: a disk tier has its lock beside it
            return "disk" if (path / "lock").exists() else "files"
        return found.quire
    return None


def has_marker(directory: int) -> bool:
    """Return whether anything in an open directory has the marker's name."""
    try:
        os.stat(MARKER, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def access_of(path: str | os.PathLike[str]) -> Access:
    """Return the rights that a directory's marker says; the owner's alone without one."""
    with suppress(OSError):
        status = os.lstat(Path(path) / MARKER)
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o060:
            return Access(status.st_gid)
    return Access()


def group_number(group: str | int | None) -> int | None:
    """Return the number of a group that is named, or numbered. Raises `ConfigError`."""
    if group is None:
        return None
    if isinstance(group, int) and not isinstance(group, bool) and 0 <= group < 1 << 31:
        return group
    text = str(group)
    if text.isdecimal() and len(text) < 10:
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except (KeyError, ValueError):
        raise ConfigError(
            f"group: this machine has no group {text[:40]!r}; give the name of a group that all who share the "
            "directory are in, or its number"
        ) from None


def open_folder(path: str) -> int:
    """Open a folder of a tier, never by a link. Raises `InTheWay` where something else is there, and `OSError`."""
    try:
        return os.open(path, _OPEN_FOLDER | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
    os.lstat(path)  # where it is what stands above it, its own error
    raise InTheWay(path)


def make_folder(path: str, access: Access) -> int:
    """Open a folder of a tier, and make it if it is not there. Raises `InTheWay` and `OSError`."""
    with suppress(FileNotFoundError):
        return open_folder(path)
    made = False
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)  # noqa: PTH102
        made = True
    folder = open_folder(path)
    if made:
        _give(access, folder)
    return folder


def create_file(name: str, folder: int, access: Access) -> int:
    """Create a file in an open folder, to write. Raises `OSError`, `FileExistsError` where anything has its name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, flags, 0o600, dir_fd=folder)
    _give(access, file)
    return file


def open_file(
    name: str, flags: int, folder: int | None = None, access: Access | None = None
) -> int:
    """Open a file of a tier, created if the flags say so.

    Raises `OSError`, and `InTheWay` for a file that may not be quire's: anything but a regular file, and
    to write also a file with several names, since its other users would see the new bytes.
    `folder` is the directory that its name is relative to, `access` its rights where it is new.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise InTheWay(name) from None
        raise
    try:
        status = os.fstat(file)
        is_written = flags & (os.O_WRONLY | os.O_RDWR)
        if not stat.S_ISREG(status.st_mode) or (is_written and status.st_nlink > 1):
            raise InTheWay(name)  # noqa: TRY301
        if access is not None and not status.st_size and status.st_uid == os.geteuid():
            access.give(file)
    except BaseException:
        os.close(file)
        raise
    return file


def _give(access: Access, made: int) -> None:
    """Set the rights of what was just made, which is closed where that fails."""
    try:
        access.give(made)
    except BaseException:
        os.close(made)
        raise


def _marker_in(directory: int, path: Path) -> tuple[_Marker | None, os.stat_result]:
    """Return what the marker of an open directory says, None where it is empty. Raises `OSError` and `TierError`."""
    try:
        with Descriptor(os.open(MARKER, _OPEN_MARKER | os.O_RDONLY, dir_fd=directory)) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise TierError(str(InTheWay(os.fspath(path))))
            data = os.read(file, _MOST_BYTES)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise TierError(str(InTheWay(os.fspath(path)))) from None
        raise
    if not any(data):  # zeros: as a loss of power may leave it
        return None, status
    try:
        return msgspec.json.decode(data, type=_Marker), status
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise TierError(f"{path} is no marker of a tier: move it elsewhere") from None
