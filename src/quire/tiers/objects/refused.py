"""Listing past names that obstore refuses: S3 by boto3, a directory by the system.

obstore fails a whole page of a listing over one name with an empty segment, `.`, `..` or a control character in it, and
anybody can write such a name beside the records.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.store import LocalStore, S3Store

from quire.tiers.objects.versions import s3_client

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def is_refused(path: str) -> bool:
    """Return whether obstore cannot read a name: one with an empty segment, `.`, `..` or a control character."""
    parts = path.removesuffix("/").split("/")
    return any(part in ("", ".", "..") for part in parts) or any(
        not " " <= each != "\x7f" for each in path
    )


def is_listable(store: ObjectStore) -> bool:
    """Return whether `list_names` can list a store."""
    return isinstance(store, (LocalStore, S3Store))


def list_names(store: Any, prefix: str, offset: str, see: Callable[[str, int], object]) -> None:
    """Show all (path, size) of a store under a prefix, behind `offset`. Blocks; raises `OSError`, and boto3's errors."""
    if isinstance(store, LocalStore):
        root = Path(store.prefix or "/")
        for file in (root / prefix).rglob("*"):
            path = file.relative_to(root).as_posix()
            if path > offset and file.is_file():
                see(path, file.stat().st_size)
        return
    client, bucket = s3_client(store, "listing past a name that obstore cannot read")
    root_name = f"{str(store.prefix).strip('/')}/" if store.prefix else ""
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix=f"{root_name}{prefix}/", StartAfter=root_name + offset
    )
    for page in pages:
        for each in page.get("Contents", ()):
            see(each["Key"].removeprefix(root_name), each["Size"])
