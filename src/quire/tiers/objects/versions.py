"""Old versions of deleted objects, which a bucket with versioning keeps: only S3's own API shows and deletes them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from quire.errors import TierError
from quire.extras import lacking
from quire.tiers.purging import Purge

AT_ONCE = 1000
"""Versions that one request deletes, at most."""

TIMEOUT_S = 10.0
"""The longest that a request waits for a connection, or for the next bytes."""

_NAMES = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "token": "aws_session_token",
    "region": "region_name",
    "endpoint": "endpoint_url",
}
"""Settings of obstore that boto3 takes under other names; what is not given both read from the environment."""

_UNSEEN = {
    "GCSStore": "Google Cloud Storage",
    "AzureStore": "Azure",
    "HTTPStore": "this web server",
}


class Versions:
    """The versions of objects in a store, under a folder of its prefix.

    `reason`  why they cannot be seen; empty where they can, or where the store keeps none
    """

    def __init__(self, store: Any, folder: str) -> None:
        self.reason = ""
        self._store = store
        self._folder = folder
        kind = type(store).__name__
        self._is_s3 = kind == "S3Store"
        if where := _UNSEEN.get(kind):
            self.reason = f"quire cannot see old versions of objects on {where}: delete those of the bucket, if it keeps any"

    def delete(self, is_own: Callable[[str], bool], purge: Purge) -> int:
        """Delete every version and delete marker of objects whose name is own; return how many. Blocks.

        Raises `TierError` where the bucket does not let itself be asked, `TimeoutError` where no time is left.
        """
        if not self._is_s3:
            return 0
        try:
            client, bucket = s3_client(self._store, "deleting old versions of objects")
            if not client.get_bucket_versioning(Bucket=bucket).get("Status"):
                return 0
            return self._delete(client, bucket, is_own, purge)
        except (TierError, TimeoutError):
            raise
        except Exception as error:  # boto3 has errors of its own
            raise TierError(f"old versions of objects are not deleted: {error}") from error

    def _delete(self, client: Any, bucket: str, is_own: Callable[[str], bool], purge: Purge) -> int:
        count = 0
        at: dict[str, str] = {}
        prefix = "/".join(filter(None, (str(self._store.prefix or ""), self._folder))) + "/"
        while purge.left_s:
            page = client.list_object_versions(Bucket=bucket, Prefix=prefix, MaxKeys=AT_ONCE, **at)
            listed = cast(
                "list[dict[str, Any]]", [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
            )
            own = [
                {"Key": each["Key"], "VersionId": each["VersionId"]}
                for each in listed
                if is_own(str(each["Key"]).rpartition("/")[2])
            ]
            if own:
                gone = client.delete_objects(Bucket=bucket, Delete={"Objects": own, "Quiet": True})
                if failed := gone.get("Errors"):
                    raise TierError(
                        f"{len(failed)} old versions of objects stay: {failed[0].get('Code')}: {failed[0].get('Message')}"
                    )
                count += len(own)
            if not page.get("IsTruncated"):
                break
            at = {
                "KeyMarker": page["NextKeyMarker"],
                "VersionIdMarker": page.get("NextVersionIdMarker", ""),
            }
        return count


def s3_client(store: Any, purpose: str) -> tuple[Any, str]:
    """Return a client of boto3 with the settings of an S3 store, and its bucket. Raises `TierError` without boto3."""
    try:
        library, botocore = import_module("boto3"), import_module("botocore.config")
    except ImportError as error:
        raise TierError(lacking(purpose, "boto3", "objects")) from error
    config = cast("dict[str, Any]", dict(store.config))
    given = {_NAMES[name]: value for name, value in config.items() if name in _NAMES}
    limits = botocore.Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S)
    return library.client("s3", config=limits, **given), str(config["bucket"])
