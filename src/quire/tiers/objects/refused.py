"""Listing past names that obstore refuses: S3 by its REST interface, a directory by the system.

obstore fails a whole page of a listing over one name with an empty segment, `.`, `..` or a control character in it, and
anybody can write such a name beside the records. Requests to S3 are signed as AWS Signature Version 4 says, in the query:
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from urllib.request import urlopen
from xml.etree import ElementTree as ET

import obstore
from obstore.store import LocalStore, S3Store

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_LIFE = timedelta(minutes=5)


def is_refused(path: str) -> bool:
    """Return whether obstore cannot read a name: one with an empty segment, `.`, `..` or a control character."""
    parts = path.removesuffix("/").split("/")
    return any(part in ("", ".", "..") for part in parts) or any(
        not " " <= each != "\x7f" for each in path
    )


def secret_of(store: ObjectStore) -> str:
    """Return the secret key of an S3 store that was given one; else nothing: then it cannot be listed here."""
    if not isinstance(store, S3Store):
        return ""
    config: dict[str, Any] = dict(store.config)
    return str(config.get("secret_access_key") or os.environ.get("AWS_SECRET_ACCESS_KEY", ""))


def is_listable(store: ObjectStore) -> bool:
    """Return whether `list_names` can list a store."""
    return isinstance(store, LocalStore) or bool(secret_of(store))


def list_names(
    store: ObjectStore,
    prefix: str,
    offset: str | None,
    see: Callable[[str, int], object],
    timeout_s: float,
) -> None:
    """Show all (path, size) of a store under a prefix, behind `offset`. Blocks; raises `OSError` and `ValueError`."""
    if isinstance(store, LocalStore):
        _list_files(Path(store.prefix or "/"), prefix, offset or "", see)
    elif isinstance(store, S3Store):
        _list_bucket(store, prefix, offset, see, timeout_s)


def _list_files(root: Path, prefix: str, offset: str, see: Callable[[str, int], object]) -> None:
    for file in (root / prefix).rglob("*"):
        path = file.relative_to(root).as_posix()
        if path > offset and file.is_file():
            see(path, file.stat().st_size)


def _list_bucket(
    store: S3Store,
    prefix: str,
    offset: str | None,
    see: Callable[[str, int], object],
    timeout_s: float,
) -> None:
    root = f"{store.prefix.strip('/')}/" if store.prefix else ""
    asked = {"list-type": "2", "encoding-type": "url", "prefix": f"{root}{prefix}/"}
    if offset is not None:
        asked["start-after"] = root + offset
    while True:
        with urlopen(_signed(store, asked), timeout=timeout_s) as answer:  # noqa: S310 - the store's own address
            page = ET.fromstring(answer.read())  # noqa: S314 - expat bounds what entities become
        space = page.tag.partition("}")[0] + "}" if page.tag.startswith("{") else ""
        for item in page.iter(f"{space}Contents"):
            name = unquote(item.findtext(f"{space}Key", ""))
            see(name.removeprefix(root), int(item.findtext(f"{space}Size", "0")))
        token = page.findtext(f"{space}NextContinuationToken")
        if not token:
            return
        asked["continuation-token"] = token


def _signed(store: S3Store, asked: dict[str, str]) -> str:
    """Return the URL of a listing. obstore signs another one, which tells where the bucket is and who asks."""
    signed = urlsplit(obstore.sign(store, "GET", "", _LIFE))
    path = signed.path
    if store.prefix:
        path = path.removesuffix(quote(store.prefix.strip("/"), safe="/-_.~")).rstrip("/") or "/"
    words = {name: values[0] for name, values in parse_qs(signed.query).items()}
    words.pop("X-Amz-Signature")
    query = "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in sorted((words | asked).items())
    )
    request = "\n".join(
        ("GET", path, query, f"host:{signed.netloc}", "", "host", "UNSIGNED-PAYLOAD")
    )
    scope = words["X-Amz-Credential"].split("/")[1:]
    text = "\n".join(
        (
            "AWS4-HMAC-SHA256",
            words["X-Amz-Date"],
            "/".join(scope),
            sha256(request.encode()).hexdigest(),
        )
    )
    key = b"AWS4" + secret_of(store).encode()
    for part in (*scope, text):
        key = hmac.new(key, part.encode(), sha256).digest()
    return f"{signed.scheme}://{signed.netloc}{path}?{query}&X-Amz-Signature={key.hex()}"
